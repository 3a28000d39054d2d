"""What stands in the way of a plan on a cluster that describes itself; without Ray."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_infer.config import load_recipe
from relax_infer.engines import orphans
from relax_infer.engines.orphans import Orphan, Unrecorded
from relax_infer.placement import plan_inference_placement, preflight
from relax_infer.placement.facts import (
    ActorFacts,
    ClusterFacts,
    GpuProcess,
    NodeFacts,
    RouterFacts,
    Wanted,
)
from relax_infer.placement.findings import Finding
from relax_infer.placement.live import look_at_node, parse_processes, runs_of
from relax_infer.placement.preflight import judge, wanted
from relax_infer.placement.room import Undecided
from relax_infer.placement.run_actors import joined
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


def test_a_recipe_without_a_plan_is_held_against_the_cluster_by_what_it_says_of_it() -> None:
    asked = wanted(RECIPE, None, "file:///store")
    assert 0 < asked.ports < ASKED.ports
    assert missing(judge(RECIPE, None, asked, cluster())) == []
    (small,) = missing(judge(RECIPE, None, asked, cluster(nodes=(node("1"),), facts=())))
    assert small.text.startswith("16 GPUs are needed: bundles 8 to 15 of 16")


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


def test_a_layout_that_could_not_be_decided_is_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "unfit_shape", lambda plan, nodes: Undecided(30_000))
    found = judge(RECIPE, PLAN, ASKED, cluster())
    assert missing(found) == []
    (note,) = [f for f in found if f.result == "note"]
    assert "these nodes could not be decided in 30000 looks" in note.text
    assert note.cure.startswith("Binding will tell")


def test_an_orphan_of_an_earlier_run_is_missing_and_one_at_work_is_not() -> None:
    """pains 5 and 6: an engine that outlived its supervisor keeps its memory."""
    told = (facts("1", orphans=(ORPHAN,)), facts("2"))
    found = refused(facts=told)
    assert "engine policy/replica-0 of run old (processes 7) is an orphan" in found.text
    assert "relax-infer stop" in found.cure
    assert "`kill 7`" in found.cure
    at_work = judge(RECIPE, PLAN, ASKED, cluster(facts=told, groups=("relax-old.pool",)))
    assert missing(at_work) == []
    assert any("may be at work there" in f.text for f in at_work if f.result == "note")


def held_by(*holds: str, silent: bool = False, actor: str = "engine.rollout.policy.replica-0"):
    """What run ``old``, which is at work, has now."""
    return {
        "groups": ("relax-old.pool",),
        "actors": (ActorFacts(run="old", actor=actor, holds=holds, silent=silent),),
    }


LEFT = ORPHAN.model_copy(
    update={"actor": "engine.rollout.policy.replica-0", "incarnation": "11111111-aaaa"}
)


def test_an_orphan_of_an_earlier_incarnation_of_a_run_at_work_is_missing() -> None:
    """pains 5 and 6: that its run has GPUs again does not make it the run's."""
    told = (facts("1", orphans=(LEFT,)), facts("2"))
    found = refused(facts=told, **held_by("22222222-bbbb"))
    assert "engine policy/replica-0 of run old (processes 7) is an orphan of an earlier" in (
        found.text
    )
    assert "incarnation, 11111111: the run is at work and has 22222222 now" in found.text
    assert "end its processes on node 10.0.0.1 (`kill 7`)" in found.cure
    nothing = refused(facts=told, **held_by())
    assert "has none now" in nothing.text


def test_what_the_runs_own_actor_holds_is_at_work() -> None:
    told = (facts("1", orphans=(LEFT,)), facts("2"))
    found = judge(RECIPE, PLAN, ASKED, cluster(facts=told, **held_by("3", "11111111-aaaa")))
    assert missing(found) == []
    assert [f.text for f in found if f.result == "note"] == [f"{LEFT} is at work there."]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (held_by(silent=True), "has an actor that does not answer for it"),
        (held_by(actor="engine.rollout.policy.replica-1"), "has no actor for it"),
    ],
)
def test_what_no_actor_answers_for_may_be_at_work(now: dict[str, Any], says: str) -> None:
    told = (facts("1", orphans=(LEFT,)), facts("2"))
    found = judge(RECIPE, PLAN, ASKED, cluster(facts=told, **now))
    assert missing(found) == []
    (note,) = [f for f in found if f.result == "note"]
    assert says in note.text
    assert "`relax-infer status old`" in note.cure


def test_what_an_actor_held_at_either_of_two_looks_is_its_own() -> None:
    def look(*holds: str, silent: bool = False) -> tuple[ActorFacts, ...]:
        return (ActorFacts(run="r", actor="a", holds=holds, silent=silent),)

    (both,) = joined(look("1"), look("2"))
    assert (both.holds, both.silent) == (("1", "2"), False)
    (one,) = joined(look(silent=True), look("2"))
    assert one.silent
    assert joined(look("1"), ()) == look("1")


def test_an_engine_without_a_file_is_told_and_is_missing_where_it_computes_on_a_gpu() -> None:
    left = Unrecorded(incarnation="33333333-cccc", about="run old, rollout replica 3", pids=(7, 8))
    told = (facts("1", unrecorded=(left,)), facts("2"))
    found = judge(RECIPE, PLAN, ASKED, cluster(facts=told))
    assert missing(found) == []
    (note,) = [f for f in found if f.result == "note"]
    assert "run old, rollout replica 3, incarnation 33333333 (processes 7, 8)" in note.text
    assert "`kill 7 8`" in note.cure
    process = GpuProcess(gpu="3", pid=8, name="sglang", mib=9)
    on_gpu = (facts("1", unrecorded=(left,), processes=(process,)), facts("2"))
    found = missing(judge(RECIPE, PLAN, ASKED, cluster(facts=on_gpu)))
    assert any("no actor of a run holds it" in f.text for f in found)
    known = cluster(facts=told, **held_by("33333333-cccc"))
    assert all("has no file" not in f.text for f in judge(RECIPE, PLAN, ASKED, known))


def test_runs_at_work_are_known_by_their_placement_groups() -> None:
    assert runs_of(("relax-a-1.pool", "relax-a-1.trainer", "relax-b.pool", "mine")) == {"a-1", "b"}


def test_a_router_is_begun_with_each_run_and_one_that_is_recorded_answers() -> None:
    well = RouterFacts(run="r", url="http://10.0.0.1:2", pid=5)
    gone = well.model_copy(update={"run": "s", "fault": "its process has ended"})
    found = judge(RECIPE, PLAN, ASKED, cluster(routers=(well, gone)))
    assert missing(found) == []
    told = [f for f in found if f.name == "router"]
    assert [(f.result, f.text) for f in told] == [
        ("ok", "is begun with each run; sglang-router 0.3.2 can be started"),
        ("ok", "that of run r answers at http://10.0.0.1:2"),
        (
            "note",
            "that of run s (process 5) is recorded and not reachable: its process has ended.",
        ),
    ]
    assert "relax-infer logs s" in told[2].cure


def test_a_folder_that_the_recipe_names_and_no_node_has_is_a_violation_of_its_field() -> None:
    split = load_recipe("split-4x8")
    placed = plan_inference_placement(split)
    asked = wanted(split, placed, "file:///store")
    sizes = dict.fromkeys(asked.models, GIB)
    sizes |= {"models/Qwen3-32B": None, "models/Qwen3-14B-safety": None}
    files = {"data/math.jsonl": None}
    nodes = tuple(facts(f"{n}", models=sizes, files=files) for n in range(4))
    whole = cluster(nodes=tuple(node(f"{n}") for n in range(4)), facts=nodes)
    found = judge(split, placed, asked, whole)
    violations = [each.violation for each in missing(found) if each.name != "recipe"]
    assert [v.field for v in violations if v is not None] == [
        "rollout.model",
        "genrm.extra_models.0.model",
    ]
    assert all(v is not None and v.rule and v.cure for v in violations)
    (disk,) = [f for f in found if f.name == "disk"]
    assert disk.result == "note", "how much is needed is not known"
    assert "cannot be told: the weights of rollout.model are on no node" in disk.text


DATA = read(
    document(
        "defer",
        16,
        ranks=1,
        rollout=engine(16, 2),
        data={"source": "file", "path": "/data/a.jsonl"},
        evaluation={"sets": [{"name": "b", "source": "file", "path": "s3://c/b.parquet"}]},
    )
)


def data_findings(here: dict[str, str | None], *there: dict[str, str | None]) -> list[Finding]:
    nodes = tuple(facts(f"{n + 1}", files=files) for n, files in enumerate(there))
    found = judge(DATA, PLAN, ASKED, cluster(facts=nodes, files=here))
    return [f for f in found if f.name == "data"]


def test_a_file_of_problems_that_nobody_can_read_is_a_violation_of_its_field() -> None:
    assert wanted(DATA, PLAN, "file:///store").files == ("/data/a.jsonl", "s3://c/b.parquet")
    gone: dict[str, str | None] = {"/data/a.jsonl": "No such file", "s3://c/b.parquet": None}
    lacking, fine = data_findings(gone, gone, gone)
    assert lacking.violation is not None
    assert lacking.violation.field == "data.path"
    assert lacking.violation.rule == "/data/a.jsonl can be read on no node: No such file."
    assert "fsspec URL" in lacking.violation.cure
    assert (fine.result, fine.text) == ("ok", "s3://c/b.parquet can be read")
    known: dict[str, str | None] = dict.fromkeys(gone)
    (note, _) = data_findings(known, gone, known)
    assert (note.result, note.violation) == ("note", None)
    assert "cannot be read on node 10.0.0.1: No such file" in note.text
    (_, bad) = data_findings({"s3://c/b.parquet": "no credentials", "/data/a.jsonl": None})
    assert bad.field == "evaluation.sets.0.path"


def test_a_process_on_a_gpu_that_ray_would_hand_out_is_missing() -> None:
    """pains 5, 6 and 7."""
    process = GpuProcess(gpu="3", pid=99, name="python", mib=115_000)
    told = (facts("1", processes=(process,)), facts("2"))
    found = refused(facts=told)
    assert "1 GPU is in use and Ray has 0 reserved" in found.text
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
        ({"models": {"policy": 0}}, "model", "policy has no *.safetensors on node 10.0.0.1"),
        ({"disk_free": GIB}, "disk", "1.0 GiB free on node 10.0.0.1, about 369.0 needed"),
        ({"router": None}, "node 10.0.0.1", "sglang-router is not installed"),
        ({"router_fault": "no wheel"}, "node 10.0.0.1", "0.3.2 does not start: no wheel"),
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


def test_a_router_that_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang_router").mkdir()
    (tmp_path / "sglang_router" / "__init__.py").write_text("raise ImportError('wrong libc')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = look_at_node(Wanted(store="s3://b", models=(), ports=1), "n", "127.0.0.1", 1)
    assert found.router_fault == "ImportError: wrong libc"


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
    files = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), str(tmp_path / "c.txt"))
    (tmp_path / "a.jsonl").write_text("{}")
    asked = Wanted(store=store, models=folders, ports=6, files=files)
    found = look_at_node(asked, "n", "127.0.0.1", 2)
    assert found.files[files[0]] is None
    assert "No such file" in str(found.files[files[1]])
    assert "neither .jsonl nor .parquet" in str(found.files[files[2]])
    assert found.router_fault is None
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
