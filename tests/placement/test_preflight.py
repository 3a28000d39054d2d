"""What stands in the way of a plan on a cluster that describes itself; without Ray."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_infer.config import load_recipe
from relax_infer.engines import orphans
from relax_infer.engines.orphans import Orphan
from relax_infer.placement import plan_inference_placement
from relax_infer.placement.facts import ClusterFacts, GpuProcess, NodeFacts, Wanted
from relax_infer.placement.live import look_at_node, parse_processes
from relax_infer.placement.preflight import Finding, judge, wanted
from tests.placement.recipes import document, engine, read
from tests.placement.test_room import node

RECIPE = read(document("defer", 16, ranks=1, rollout=engine(16, 2)))
PLAN = plan_inference_placement(RECIPE)
ASKED = wanted(RECIPE, PLAN, "file:///store")
ORPHAN = Orphan(
    run="old", engine_id="policy/replica-0", node_ip="10.0.0.1", devices=("x",), pids=(7,)
)
GIB = 1 << 30


def facts(name: str, **more: Any) -> NodeFacts:
    """Of a node on which all is well."""
    good = {"disk_free": 500 * GIB, "models": {"policy": 16 * GIB}, "router": "0.3.2"}
    return NodeFacts(node_id=f"{name}-identity", node_ip=f"10.0.0.{name}", **(good | more))


def cluster(**more: Any) -> ClusterFacts:
    both = {"nodes": (node("1"), node("2")), "facts": (facts("1"), facts("2"))}
    return ClusterFacts(**{"accelerators": True, "groups": (), **both, **more})


def missing(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.result == "missing"]


def refused(**more: Any) -> Finding:
    (only,) = missing(judge(RECIPE, PLAN, ASKED, cluster(**more)))
    return only


def test_a_cluster_on_which_all_is_well_has_nothing_missing() -> None:
    found = judge(RECIPE, PLAN, ASKED, cluster())
    assert [(f.name, f.result) for f in found] == [
        ("cluster", "ok"),
        ("ports", "ok"),
        ("disk", "ok"),
        ("router", "ok"),
    ]
    assert found[0].text == "16 GPUs are needed, 16 are free on 2 nodes"


def test_a_cluster_that_is_too_small_says_which_bundle_lacks_what_where() -> None:
    """pains 24."""
    found = refused(nodes=(node("1"), node("2", cpus=4)))
    assert found.text.startswith("16 GPUs are needed: bundles 12 to 15 of 16")
    assert "10.0.0.2 (2-identi) has room for 4 and then lacks CPU (4 of 4 free)" in found.text
    assert "lower cluster.gpus" in found.cure


def test_gpus_that_others_hold_are_told_with_the_holder() -> None:
    """pains 24."""
    held = node("1", free_gpus=1.0, holders=("relax-other.pool",))
    found = refused(nodes=(held, node("2")))
    assert "bundles 9 to 15 of 16" in found.text
    assert "held by relax-other.pool" in found.text
    assert "Wait for those who hold the GPUs" in found.cure


def test_engines_larger_than_a_node_are_refused_by_name() -> None:
    quarters = tuple(node(f"{n}", gpus=1, cpus=1) for n in range(16))
    found = missing(judge(RECIPE, PLAN, ASKED, cluster(nodes=quarters, facts=())))
    assert [f.text.partition(": ")[0] for f in found] == [
        f"rollout/policy replica {n}" for n in range(8)
    ]
    assert all("must be on one node" in f.text for f in found)


def test_free_gpus_in_pieces_are_worth_a_note() -> None:
    pieces = (node("1", gpus=9, free_gpus=7.0), node("2", gpus=9, cpus=9))
    found = judge(RECIPE, PLAN, ASKED, cluster(nodes=pieces))
    assert missing(found) == []
    (note,) = [f for f in found if f.result == "note"]
    assert "what is free now is in pieces" in note.text


def test_an_orphan_of_an_earlier_run_is_missing_and_one_at_work_is_not() -> None:
    """pains 5 and 6: an engine that outlived its supervisor keeps its memory."""
    told = (facts("1", orphans=(ORPHAN,)), facts("2"))
    found = refused(facts=told)
    assert "engine policy/replica-0 of run old (processes 7) is an orphan" in found.text
    assert "relax-infer stop" in found.cure
    at_work = judge(RECIPE, PLAN, ASKED, cluster(facts=told, groups=("relax-old.pool",)))
    assert missing(at_work) == []
    assert any("is at work there" in f.text for f in at_work if f.result == "note")


def test_a_process_on_a_gpu_that_ray_would_hand_out_is_missing() -> None:
    """pains 5, 6 and 7."""
    process = GpuProcess(gpu="3", pid=99, name="python", mib=115_000)
    told = (facts("1", processes=(process,)), facts("2"))
    found = refused(facts=told)
    assert "1 GPUs are in use and Ray has 0 reserved" in found.text
    assert "process 99 python on GPU 3, 115000 MiB" in found.text
    one_more = replace(node("1"), gpus=9.0, cpus=9.0)
    found = judge(RECIPE, PLAN, ASKED, cluster(facts=told, nodes=(one_more, node("2"))))
    assert missing(found) == []


@pytest.mark.parametrize(
    ("fault", "name", "says"),
    [
        ({"silent": "no answer"}, "node 10.0.0.1", "did not describe itself: no answer"),
        ({"port_fault": "in use"}, "node 10.0.0.1", "ports cannot be had at 10.0.0.1: in use"),
        ({"models": {"policy": None}}, "model", "the folder policy is not on node 10.0.0.1"),
        ({"disk_free": GIB}, "disk", "1.0 GiB free on node 10.0.0.1, about 369.0 needed"),
        ({"router": None}, "node 10.0.0.1", "sglang-router is not installed"),
    ],
)
def test_what_a_node_lacks_is_missing(fault: dict[str, Any], name: str, says: str) -> None:
    found = refused(facts=(facts("1", **fault), facts("2")))
    assert found.name == name
    assert says in found.text
    assert found.cure


def test_buckets_of_weights_need_room_in_shared_memory() -> None:
    small = cluster(facts=(facts("1", shared_memory_free=64_000_000), facts("2")))
    assert missing(judge(RECIPE, PLAN, ASKED, small)) == []
    weights = RECIPE.train.weights.model_copy(update={"transport": "tensor"})
    train = RECIPE.train.model_copy(update={"weights": weights})
    recipe = RECIPE.model_copy(update={"train": train})
    (found,) = missing(judge(recipe, PLAN, ASKED, small))
    assert (found.name, "shm-size" in found.cure) == ("node 10.0.0.1", True)
    assert "64 MB of shared memory are free" in found.text


def test_a_store_that_is_on_no_disk_is_not_looked_at() -> None:
    told = (facts("1", disk_free=None), facts("2", disk_free=None))
    found = judge(RECIPE, PLAN, ASKED, cluster(facts=told))
    assert [f.text for f in found if f.name == "disk"] == [
        "the store is on no disk of the nodes; its room was not looked at."
    ]


def test_pretended_gpus_are_none_for_a_recipe_of_cuda() -> None:
    recipe = read(document("defer", 16, ranks=1), cluster__device="cuda")
    plan = plan_inference_placement(recipe)
    (found,) = missing(judge(recipe, plan, ASKED, cluster(accelerators=False)))
    assert "cluster.device is cuda" in found.text


def test_what_runs_do_not_do_yet_is_among_the_reasons() -> None:
    recipe = load_recipe("decoupled-64x8-pd")
    plan = plan_inference_placement(recipe)
    found = missing(judge(recipe, plan, ASKED, cluster()))
    assert {f.name for f in found} == {"recipe", "cluster"}


def test_every_folder_of_a_model_that_takes_part_is_asked_for() -> None:
    split = load_recipe("split-4x8")
    asked = wanted(split, plan_inference_placement(split), "file:///store")
    assert asked.models == (
        "models/Qwen3-32B",
        "models/Qwen3-14B-quality",
        "models/Qwen3-14B-safety",
        "models/Qwen3-235B-A22B",
    )
    elsewhere = load_recipe("split-4x8", {"teacher.url": "http://teacher:30000"})
    asked = wanted(elsewhere, plan_inference_placement(elsewhere), "file:///store")
    assert asked.models[-1] == "models/Qwen3-14B-safety"
    quick = load_recipe("quickstart")
    assert wanted(quick, plan_inference_placement(quick), "s3://store").models == ()


def test_processes_are_read_from_the_drivers_table() -> None:
    table = "GPU-b, 12, /usr/bin/python3, 115000\nGPU-c, 13, a, b, [N/A]\nNo devices were found\n"
    assert parse_processes(table, {"0": "GPU-a", "1": "GPU-b"}) == (
        GpuProcess(gpu="1", pid=12, name="/usr/bin/python3", mib=115_000),
        GpuProcess(gpu="GPU-c", pid=13, name="a, b", mib=None),
    )


def test_a_node_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"1234")
    (tmp_path / f"relax-{os.getuid()}" / "key").mkdir(parents=True)
    (tmp_path / f"relax-{os.getuid()}" / "key" / "e.holder.json").write_text("{")
    folders = (str(tmp_path / "model"), str(tmp_path / "none"))
    store = (tmp_path / "not" / "made" / "yet").as_uri()
    found = look_at_node(Wanted(store=store, models=folders, ports=6), "n", "127.0.0.1", 2)
    assert found.models == {folders[0]: 4, folders[1]: None}
    assert found.disk_free is not None
    assert found.shared_memory_free is not None
    assert found.port_fault is None
    assert found.router
    assert [each.devices for each in found.orphans] == [("n/0", "n/1")]
    away = Wanted(store="s3://bucket/store", models=(), ports=1)
    elsewhere = look_at_node(away, "n", "192.0.2.1", 1)
    assert elsewhere.disk_free is None
    assert elsewhere.port_fault is not None
    assert NodeFacts.model_validate_json(found.model_dump_json()) == found
