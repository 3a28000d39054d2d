"""The command line and environment of one engine process."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.digest import checkpoint_dtype
from relax_infer.engines.flags import by_flag
from relax_infer.engines.folders import REPLICA, replica_mark
from relax_infer.engines.release import MARKER

Scalar = str | int | float | bool | None

CPU_SHIM = Path(__file__).parent / "cpu_shim"
"""Folder for the PYTHONPATH of every process that loads a model on a machine without CUDA."""

ABOUT = "RELAX_ABOUT"
"""Variable that tells an engine's processes what their log lines and metrics are about: JSON."""

_CPU: dict[str, Scalar] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.1,
    "max-total-tokens": 8192,
    "max-running-requests": 32,
    "context-length": 1024,
    # Without it an idle server burns a core.
    "sleep-on-idle": True,
}


def server_settings(
    spec: EngineGroupSpec,
    *,
    host: str,
    port: int,
    dist_port: int,
    model_path: str,
    weight_version: int | None,
    node: int = 0,
    rendezvous: str | None = None,
) -> dict[str, Scalar]:
    """SGLang's flags without dashes; what the spec sets wins over the defaults of the device.

    ``rendezvous`` is the ``HOST:PORT`` at which the ranks of several nodes meet: the same for each.

    Raises:
        PermanentError: the spec gives one flag under two names.
    """
    given = by_flag(spec.server_args)
    settings: dict[str, Scalar] = {
        "model-path": model_path,
        "served-model-name": spec.model,
        "tp-size": spec.gpus_per_replica // _pipeline(given),
        "log-level": "info",
        "log-level-http": "warning",
    }
    if weight_version is not None:
        settings["weight-version"] = str(weight_version)
    if spec.device == "cpu":
        # "auto" would narrow float32 to float16.
        settings |= _CPU | {"dtype": checkpoint_dtype(Path(spec.model_path))}
    elif spec.offload == "memory_saver":
        # Weights keep a copy in host memory, or a resume would bring back garbage.
        settings |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    settings |= given
    # The engine's actor decides these; whatever the spec says of them cannot be.
    several = spec.nodes_per_replica > 1
    return settings | {
        **{"host": host, "port": port, "nccl-port": dist_port},
        "nnodes": spec.nodes_per_replica if several else None,
        "node-rank": node if several else None,
        "dist-init-addr": rendezvous if several else None,
    }


def _pipeline(given: Mapping[str, Scalar]) -> int:
    size = given.get("pp-size")
    return size if isinstance(size, int) and size > 1 else 1


def command_line(
    spec: EngineGroupSpec,
    settings: Mapping[str, Scalar],
    *,
    socket: Path,
    token: FenceToken,
    request_log: Path,
) -> list[str]:
    """Arguments of the fenced server: True is a bare flag, False and None leave a flag out."""
    command = [
        *(spec.python or sys.executable, "-m", "relax_infer.engines.server"),
        *("--fence-socket", str(socket), "--fence-token", str(token)),
        *("--request-log", str(request_log)),
    ]
    if spec.nodes_per_replica > 1:
        command += ["--fence-nodes", str(spec.nodes_per_replica)]
    for name, value in settings.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    return command


def environment(
    spec: EngineGroupSpec,
    incarnation: str,
    gpus: tuple[int, ...],
    inherited: Mapping[str, str] | None = None,
    *,
    replica: int = 0,
    scratch: Path | None = None,
) -> dict[str, str]:
    """Variables of the processes on one node: the caller's own, changed where it matters.

    ``scratch`` is the folder of what they write in passing.
    """
    variables = dict(os.environ if inherited is None else inherited)
    if scratch is not None:
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", _compiled())
        variables["TMPDIR"] = str(scratch)
    # Ray shows its actor one device of a fraction; an engine gets its own list.
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus)) if spec.device == "cuda" else ""
    variables |= {
        MARKER: incarnation,
        # Else setproctitle erases the marker from the very processes that hold the memory.
        "SPT_NOENV": "1",
        "HF_HUB_OFFLINE": "1",
        # Longer than callers keep idle connections: else one that is reused as it is being
        # closed fails a request, and a POST is not sent again.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "PYTHONUNBUFFERED": "1",
        ABOUT: json.dumps(about(spec, replica)),
        REPLICA: replica_mark(spec, replica),
    }
    if spec.device == "cpu":
        variables["OMP_NUM_THREADS"] = variables.get("OMP_NUM_THREADS", "1")
        paths = [str(CPU_SHIM), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        if spec.gpus_per_replica > 1:
            # Else SGLang wants a NUMA node of its own for every rank of the engine.
            shares = cores_of_ranks(sorted(os.sched_getaffinity(0)), spec.gpus_per_node)
            variables.setdefault("SGLANG_CPU_OMP_THREADS_BIND", shares)
    return variables


def about(spec: EngineGroupSpec, replica: int) -> dict[str, str | int]:
    return {"run": spec.run, "role": spec.role, "replica": replica}


def _compiled() -> str:
    """Where torch keeps what it compiled, by default: the next incarnation wants it again."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """``SGLANG_CPU_OMP_THREADS_BIND``: a group of this host's cores for each of its ranks.

    Where there are more ranks than cores they take turns.
    """
    each = max(1, len(cores) // ranks)
    groups = [[cores[(rank * each + k) % len(cores)] for k in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)
