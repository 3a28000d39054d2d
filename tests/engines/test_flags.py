"""The names of SGLang's flags, against SGLang's own parser, which needs the shim on its path."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_infer.config import load_recipe, shipped_recipes
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.command import CPU_SHIM, command_line, server_settings
from relax_infer.engines.flags import ALIASES
from relax_infer.placement._demands import Demand, inference_demands

_PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
read = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
names = [[name[2:] for name in action.option_strings] for action in parser._actions]
print(json.dumps({"read": read, "names": names}, default=str))
"""


def by_sglang(lines: list[list[str]]) -> Any:
    """``read``: what it reads on each command line; ``names``: of every flag, its own first."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PARSE],
        input=json.dumps(lines),
        env=os.environ | {"PYTHONPATH": str(CPU_SHIM), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def demands() -> list[tuple[str, Demand]]:
    """Of every shipped recipe."""
    return [(name, d) for name in shipped_recipes() for d in inference_demands(load_recipe(name))]


def command(demand: Demand) -> list[str]:
    """SGLang's part of the command line of one of its engines."""
    spec = EngineGroupSpec(
        run="run-1",
        role=demand.role,
        model=demand.model_id,
        model_path="models/m",
        weight_source="ACTOR" if demand.role == "rollout" else "STATIC",
        replicas=demand.replicas,
        gpus_per_replica=demand.gpus_per_replica,
        nodes_per_replica=-(-demand.gpus_per_replica // 8),
        offload="memory_saver",
        ray_gpu_fraction=0.2,
        placement_group="pool",
        bundles=(),
        device="cuda",
        server_args=demand.server_args,
        store="file:///store",
    )
    settings = server_settings(
        spec,
        host="127.0.0.1",
        port=1,
        dist_port=2,
        model_path="models/m",
        weight_version=0,
        rendezvous="127.0.0.1:3",
    )
    line = command_line(
        spec,
        settings,
        socket=Path("s"),
        token=FenceToken(counter=1, grant_id="g"),
        request_log=Path("l"),
    )
    return line[line.index("--model-path") :]


@pytest.fixture(scope="module")
def shipped() -> tuple[list[tuple[str, Demand]], Any]:
    """Every shipped engine, and what SGLang says of all their command lines."""
    engines = demands()
    return engines, by_sglang([command(demand) for _, demand in engines])


def test_sglang_reads_the_command_line_of_every_shipped_engine(
    shipped: tuple[list[tuple[str, Demand]], Any],
) -> None:
    engines, found = shipped
    for (recipe, demand), read in zip(engines, found["read"], strict=True):
        assert read["tp_size"] * read["pp_size"] == demand.gpus_per_replica, recipe
        assert read["dp_size"] == 1 or read["enable_dp_attention"] is True
        for name, value in demand.engine.server_args.items():
            assert read[name] == value, (recipe, name)
    read = {(n, d.field): r for (n, d), r in zip(engines, found["read"], strict=True)}
    judge = read["defer-2x8-genrm", "genrm.engine"]
    assert (judge["dp_size"], judge["enable_dp_attention"], judge["ep_size"]) == (8, True, 8)
    assert read["decoupled-64x8-pd", "teacher.engine"]["pp_size"] == 2


def test_every_second_name_that_sglang_knows_is_in_the_table(
    shipped: tuple[list[tuple[str, Demand]], Any],
) -> None:
    names = [each for each in shipped[1]["names"] if each]
    others = {
        other: own for own, *more in names for other in more if other not in ("help", f"no-{own}")
    }
    assert others.items() <= ALIASES.items()
    flags = {own for own, *_ in names}
    assert not ALIASES.keys() & flags
    assert set(ALIASES.values()) <= flags
