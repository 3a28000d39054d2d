"""Evidence of a release: staged, read back, judged."""

from pathlib import Path

import pytest

from relax_infer.contracts.engines import OffloadCheck, ReleaseEvidence
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.evidence import (
    check_evidence,
    read_evidence,
    release_evidence,
    write_evidence,
)
from relax_infer.engines.memory import NodeUse
from tests.engines.checkpoints import group_spec

TOKEN = FenceToken(counter=7, grant_id="g")
CHECK = OffloadCheck(role="rollout", fence=TOKEN, evidence=(), holders=("p/0", "p/1"))


def given(holder: str, **changes: object) -> ReleaseEvidence:
    row = {"holder": holder, "proof": "simulated", "tags": CHECK.tags, "fence": TOKEN, "at": 1.0}
    return ReleaseEvidence.model_validate({**row, **changes})


BOTH = [given("p/0"), given("p/1", proof="process_gone")]


def test_evidence_of_every_holder_under_the_token_is_confirmed_with_its_kinds_of_proof():
    confirmed = check_evidence(CHECK, BOTH)
    assert (confirmed.holders, confirmed.proof) == (2, ("process_gone", "simulated"))


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (BOTH[:1], "p/1 gave none"),
        ([*BOTH, given("p/0")], "p/0 gave 2 times"),
        ([*BOTH, given("q/0")], "q/0 was not asked for"),
        (
            [BOTH[0], given("p/1", fence=FenceToken(counter=6, grant_id="g"))],
            "p/1 answered for fence token 6:g",
        ),
        (
            [BOTH[0], given("p/1", fence=FenceToken(counter=7, grant_id="other"))],
            "p/1 answered for fence token 7:other",
        ),
        ([BOTH[0], given("p/1", tags=("weights",))], "p/1 released ['weights']"),
        ([BOTH[0], given("p/1", tags=(*CHECK.tags, "more"))], "p/1 released"),
        (
            [BOTH[0], given("p/1", proof="memory", memory_after=9, residual_allowed=8)],
            "p/1 still has 9 bytes in use, 8 allowed",
        ),
        (
            [BOTH[0], given("p/1", proof="process_gone", memory_after=9, residual_allowed=8)],
            "p/1 still has 9 bytes",
        ),
        (
            [
                BOTH[0],
                given(
                    "p/1",
                    proof="memory",
                    memory_after=8,
                    residual_allowed=8,
                    nodes=(
                        {"node": 0, "before": 9, "after": 2, "allowed": 4},
                        {"node": 1, "before": 9, "after": 6, "allowed": 4},
                    ),
                ),
            ],
            "p/1 still has 6 bytes in use on its node 1, 4 allowed",
        ),
        ([BOTH[0], given("p/1", proof="memory")], "p/1 claims freed memory"),
        ([BOTH[0], given("p/1", proof="memory", residual_allowed=8)], "did not say how much"),
    ],
)
def test_evidence_that_is_off_is_refused_by_holder_and_reason(evidence, why):
    with pytest.raises(UnconfirmedError) as refused:
        check_evidence(CHECK, evidence)
    assert why in str(refused.value)


def test_every_doubt_is_named_at_once():
    with pytest.raises(UnconfirmedError) as refused:
        check_evidence(CHECK, [given("p/0", tags=())])
    assert "p/1 gave none" in str(refused.value)
    assert "p/0 released []" in str(refused.value)


def test_memory_within_the_allowance_is_proof():
    rows = [given(h, proof="memory", memory_after=8, residual_allowed=8) for h in CHECK.holders]
    assert check_evidence(CHECK, rows).proof == ("memory",)


def test_it_is_staged_by_operation_and_reads_back_the_same(tmp_path: Path):
    spec = group_spec(tmp_path)
    ref = write_evidence(spec, "run-1.step-2/offload:7", BOTH)
    assert ref.rows == 2
    assert ref.uri.startswith(f"{spec.store}/r/engines/evidence/run-1.step-2-offload-7.")
    assert read_evidence(ref) == BOTH
    assert write_evidence(spec, "run-1.step-2/offload:7", BOTH) == ref
    folder = tmp_path / "store/r/engines/evidence"
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_new_evidence_of_the_same_operation_leaves_the_old_file_as_it_was(tmp_path: Path):
    spec = group_spec(tmp_path)
    old = write_evidence(spec, "op", BOTH)
    new = write_evidence(spec, "op", BOTH[:1])
    assert (read_evidence(old), read_evidence(new)) == (BOTH, BOTH[:1])


def test_evidence_that_was_changed_or_is_gone_is_not_read(tmp_path: Path):
    ref = write_evidence(group_spec(tmp_path), "op", BOTH)
    path = Path(ref.uri.removeprefix("file://"))
    path.write_text(path.read_text().replace("process_gone", "memory"))
    with pytest.raises(PermanentError, match="was changed"):
        read_evidence(ref)
    path.unlink()
    with pytest.raises(PermanentError, match="is gone"):
        read_evidence(ref)


def use(node: int, at_launch: int | None, after: int | None) -> NodeUse:
    return NodeUse(node=node, devices=8, at_launch=at_launch, in_use=90, after=after)


def test_evidence_of_several_nodes_has_the_sum_and_every_node_s_own_measure():
    uses = (use(0, 1, 10), use(1, 2, 20))
    made = release_evidence("p/0", TOKEN, at=1.0, gone=False, uses=uses, beyond=5)
    assert made.proof == "memory"
    assert (made.memory_before, made.memory_after, made.residual_allowed) == (180, 30, 83)
    assert [(part.node, part.after, part.allowed) for part in made.nodes] == [
        (0, 10, 41),
        (1, 20, 42),
    ]
    alone = release_evidence("p/0", TOKEN, at=1.0, gone=False, uses=uses[:1], beyond=5)
    assert (alone.memory_after, alone.residual_allowed, alone.nodes) == (10, 41, ())


def test_nodes_that_cannot_tell_are_simulated_together_and_unconfirmed_beside_one_that_can():
    silent = use(1, None, None)
    made = release_evidence("p/0", TOKEN, at=1.0, gone=False, uses=(silent, silent))
    assert (made.proof, made.memory_after) == ("simulated", None)
    with pytest.raises(UnconfirmedError, match=r"nodes \[1\]"):
        release_evidence("p/0", TOKEN, at=1.0, gone=False, uses=(use(0, 1, 2), silent))
    gone = release_evidence("p/0", TOKEN, at=1.0, gone=True, uses=(use(0, 1, 2), silent))
    assert (gone.proof, gone.memory_after) == ("process_gone", 2)
