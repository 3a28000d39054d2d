"""What a request means, the table around added replicas, and their places; no Temporal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.contracts.engines import (
    AddedReplica,
    BundleBinding,
    EngineGroupSpec,
    EngineOperation,
    ReplicaReport,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import RoleInput
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.scale import Members, OutsiderRecord, ScaleRequest, added_pool
from relax_infer.machines import GroupState, ReplicaState, ScaleEvent
from tests.workflows.scripted_world import plan
from workflows._group_book import GroupBook
from workflows._mailbox import Mailbox
from workflows._outsiders import Outsiders
from workflows._scale_desk import REMEMBERED, ScaleDesk
from workflows._scale_plan import plan_scale


def group(**changes: object) -> EngineGroupSpec:
    return plan("run").groups[0].model_copy(update=changes)


def placement(replica: int, gpus: int = 1, nodes: int = 1) -> AddedReplica:
    rows = tuple(
        BundleBinding(
            bundle=k,
            node_id=f"n{k * nodes // gpus}",
            node_ip="127.0.0.1",
            gpu_id=k % (gpus // nodes),
        )
        for k in range(gpus)
    )
    name = added_pool(group(), replica)
    return AddedReplica(replica=replica, placement_group=name, bundles=rows)


def report(replica: int, state: ReplicaState = ReplicaState.READY) -> ReplicaReport:
    return ReplicaReport(
        replica=replica,
        engine_id=f"policy/replica-{replica}",
        state=state,
        base_url=f"http://host:{replica}",
        incarnation=f"i{replica}",
        weight_version=3,
        weights_digest="d3",
    )


# --- places


def test_every_node_of_an_added_replica_has_its_share_and_one_head():
    """Two nodes of eight GPUs make one replica of sixteen: two actors, in bundles 0 and 8."""
    spec = group(gpus_per_replica=16, nodes_per_replica=2).with_added(placement(5, 16, 2))
    heads = [spec.node_bundles(5, node)[0] for node in range(2)]
    assert [head.bundle for head in heads] == [0, 8]
    assert [head.node_id for head in heads] == ["n0", "n1"]
    assert [len(spec.node_bundles(5, node)) for node in range(2)] == [8, 8]
    assert [spec.actor_name(5, node) for node in range(2)] == [
        "engine.rollout.policy.replica-5",
        "engine.rollout.policy.replica-5.node-1",
    ]
    assert spec.pool_of(5) == "added-rollout-policy-5"


def test_replicas_that_were_there_keep_their_places():
    rows = placement(0, 2).bundles
    spec = group(bundles=rows).with_added(placement(4), placement(2))
    assert spec.numbers == (0, 1, 2, 4)
    assert spec.node_bundles(1, 0) == rows[1:2]
    assert spec.pool_of(1) == "pool"
    assert spec.without(2).numbers == (0, 1, 4)
    alone = spec.alone(placement(4))
    operation = EngineOperation(
        group=alone, operation_id="x", fence=FenceToken(counter=1, grant_id="g")
    )
    assert operation.targets == (4,)


def test_names_of_pools_have_no_dot():
    assert "." not in added_pool(group(model="qwen2.5"), 3)


# --- decisions


def members(first: int = 2, added: tuple[int, ...] = (), left: tuple[int, ...] = ()) -> Members:
    spec = group(replicas=first).with_added(*(placement(k) for k in added))
    return Members(
        spec=spec,
        state=GroupState.READY,
        urls={k: f"http://host:{k}" for k in added},
        outsiders=tuple(
            OutsiderRecord(replica=k, stage="left", operation="o", url=f"http://host:{k}")
            for k in left
        ),
    )


def request(**fields: object) -> ScaleRequest:
    return ScaleRequest.model_validate({"operation_id": "x", **fields})


def test_what_was_left_goes_before_the_newest():
    decided = plan_scale(request(num_replicas=3), members(added=(3, 4, 7), left=(5,)))
    assert (decided.event, decided.remove) == (ScaleEvent.IN_STARTED, (5, 7, 4))
    only = plan_scale(request(num_replicas=2), members(left=(5,)))
    assert only.remove == (5,)


def test_what_was_left_is_found_by_its_address():
    decided = plan_scale(request(engine_urls=("http://host:5/",)), members(left=(5,)))
    assert decided.remove == (5,)


@given(
    st.integers(1, 4),
    st.sets(st.integers(4, 12), max_size=5),
    st.integers(0, 12),
    st.sampled_from([None, "in", "out"]),
)
def test_an_absolute_target_is_never_overshot(
    first: int, added: set[int], target: int, direction: str | None
):
    there = first + len(added)
    decided = plan_scale(
        request(num_replicas=target, direction=direction), members(first, tuple(sorted(added)))
    )
    after = there + decided.create - len(decided.remove)
    assert set(decided.remove) <= added, "those that the group began with stay"
    assert not (decided.create and decided.remove)
    if decided.event in (ScaleEvent.OUT_STARTED, ScaleEvent.IN_STARTED):
        assert after == target
    else:
        assert after == there
        assert target < first or target == there or direction is not None


# --- the table


def test_the_table_keeps_added_replicas_over_continue_as_new():
    book = GroupBook(group())
    (two, three) = book.outsiders.reserve(2, "one")
    book.outsiders.place(placement(two))
    book.adopt(placement(two), report(two))
    book.outsiders.place(placement(three))
    book.outsiders.abandon("one")
    again = GroupBook.restore(group(), book.carry())
    assert again.spec == book.spec
    assert again.spec.numbers == (0, 1, 2)
    assert again.snapshot() == book.snapshot()
    assert again.outsiders.all == book.outsiders.all
    assert again.outsiders.urls == {2: "http://host:2"}
    assert again.outsiders.reserve(1, "two") == (4,)
    assert again.carry() == GroupBook.restore(group(), again.carry()).carry()


def test_one_that_leaves_is_not_the_group_s_and_one_that_stays_is_as_it_was():
    book = GroupBook(group())
    book.outsiders.reserve(1, "one")
    book.adopt(placement(2), report(2))
    before = book.snapshot()
    book.leave(2, "two")
    assert book.usable == book.askable == (0, 1)
    assert book.ready == ()
    assert book.snapshot().leaving == (2,)
    assert book.outsiders.leave
    book.stay(2)
    assert book.snapshot() == before


def test_a_history_of_earlier_code_carries_on():
    book = GroupBook(group())
    carried = book.carry()
    del carried["added"], carried["outsiders"]
    assert GroupBook.restore(group(), carried).outsiders.reserve(1, "x") == (2,)


def test_abandoned_work_is_left_and_what_never_had_gpus_needs_no_stop():
    outsiders = Outsiders(2)
    outsiders.reserve(2, "one")
    outsiders.place(placement(2))
    outsiders.reserve(1, "two")
    outsiders.abandon("one")
    assert [(r.replica, r.stage, r.stopped) for r in outsiders.all] == [
        (2, "left", False),
        (3, "left", True),
        (4, "making", False),
    ]


# --- the desk


def desk(carried: list[object] | None = None) -> ScaleDesk:
    run = RunRef(run="run", store="memory://store")
    start = RoleInput(run=run, role="rollout", groups=(group(),), shares_with=())
    return ScaleDesk(start, Mailbox(), carried)


def kept(operation_id: str) -> list[object]:
    asked = request(num_replicas=3).model_copy(update={"operation_id": operation_id})
    status = {
        "operation_id": operation_id,
        "run": "run",
        "role": "rollout",
        "model": "policy",
        "state": "ACTIVE",
        "ended": True,
    }
    return [asked.fingerprint, status]


def test_the_last_hundred_results_are_kept_over_continue_as_new():
    first = desk([kept(f"op-{k}") for k in range(REMEMBERED + 5)])
    first._forget_old()
    assert len(first.all) == REMEMBERED
    again = desk(first.carry())
    assert [s.operation_id for s in again.all] == [s.operation_id for s in first.all]
    again.check(request(num_replicas=3).model_copy(update={"operation_id": "op-50"}))
    with pytest.raises(ValueError, match="asked for something else"):
        again.check(request(num_replicas=4).model_copy(update={"operation_id": "op-50"}))
    again.closing = True
    with pytest.raises(ValueError, match="Rollout shutdown has started"):
        again.check(request(num_replicas=3))
