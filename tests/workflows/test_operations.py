"""Operation ids of the lease, without Temporal: what the same id gets when it comes again."""

import json

import pytest
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LeaseAnswer, LeaseRequest
from relax_infer.contracts.refs import StagedRef
from workflows import _operations
from workflows._lease_book import LeaseRefused
from workflows._operations import Operations


def asked(operation_id: str = "op-1", **fields: object) -> LeaseRequest:
    given = {"method": "activate", "role": "genrm", "batch": "step-1", **fields}
    return LeaseRequest.model_validate({"operation_id": operation_id, **given})


ANSWER = LeaseAnswer(fence=FenceToken(counter=3, grant_id="op-1"))


def test_the_same_id_finds_the_operation_at_work_and_then_its_answer():
    operations = Operations()
    assert operations.find(asked()) is None
    begun = operations.begin(asked())
    assert operations.find(asked()) is begun
    assert not operations.idle
    begun.answer = ANSWER
    again = operations.find(asked())
    assert again is not None
    assert again.result() == ANSWER
    assert operations.idle


def test_a_failed_operation_fails_again_with_the_same_words():
    operations = Operations()
    operations.begin(asked()).error = ("Unconfirmed", "genrm did not answer")
    for _ in range(2):
        again = operations.find(asked())
        assert again is not None
        with pytest.raises(ApplicationError, match="genrm did not answer") as failed:
            again.result()
        assert failed.value.type == "Unconfirmed"


@pytest.mark.parametrize(
    "other",
    [
        {"role": "teacher"},
        {"batch": "step-2"},
        {"method": "acquire", "purpose": "eval"},
        {"weights": {"version": 3, "uri": "/weights/3", "digest": "d3"}},
    ],
)
def test_an_id_is_not_used_for_something_else(other: dict[str, str]):
    operations = Operations()
    operations.begin(asked()).answer = ANSWER
    with pytest.raises(LeaseRefused, match="different fingerprint"):
        operations.find(asked(**other))


def test_ended_operations_are_forgotten_beyond_a_bound_and_those_at_work_never(
    monkeypatch: pytest.MonkeyPatch,
):
    assert _operations._REMEMBERED == 8192
    monkeypatch.setattr(_operations, "_REMEMBERED", 3)
    operations = Operations()
    operations.begin(asked("at-work"))
    for number in range(4):
        operations.begin(asked(f"op-{number}")).answer = ANSWER
        operations.forget_old()
    known = [n for n in range(4) if operations.find(asked(f"op-{n}")) is not None]
    assert known == [2, 3]
    assert operations.find(asked("at-work")) is not None


def test_what_is_remembered_survives_continue_as_new():
    operations = Operations()
    operations.begin(asked("done")).answer = ANSWER
    operations.begin(asked("failed")).error = ("Permanent", "no")
    again = Operations(operations.carry())
    done, failed = again.find(asked("done")), again.find(asked("failed"))
    assert done is not None
    assert failed is not None
    assert (done.result(), failed.error) == (ANSWER, ("Permanent", "no"))


def release(number: int) -> LeaseAnswer:
    """As large as one of a role with 16 replicas."""
    staged = StagedRef(
        uri=f"s3://bucket/relax/run-1/evidence/rollout-{number:08}.json", sha256="0" * 64, rows=16
    )
    return LeaseAnswer(
        fence=FenceToken(counter=number, grant_id=f"{asked_by(number)}"),
        evidence=(staged,),
        holders=tuple(f"policy/replica-{k}" for k in range(16)),
    )


def asked_by(number: int) -> str:
    return f"run-1.step-{number}:0198f2a0-4b7c-7d1e-9d2a-0123456789ab:{number}:rollout:deactivate"


def test_a_full_window_of_answers_fits_into_what_temporal_carries():
    operations = Operations()
    for number in range(_operations._REMEMBERED):
        operations.begin(asked(asked_by(number))).answer = release(number)
        operations.forget_old()
    carried = operations.carry()
    assert len(json.dumps(carried)) < 300 * 1024
    operations = Operations(json.loads(json.dumps(carried)))
    assert operations.carry() == carried
    newest = operations.find(asked(asked_by(_operations._REMEMBERED - 1)))
    assert newest is not None
    assert newest.result() == release(_operations._REMEMBERED - 1)
    for number in (0, _operations._REMEMBERED // 2):
        assert operations.find(asked(asked_by(number))) is not None
    operations.begin(asked("one more")).answer = LeaseAnswer()
    operations.forget_old()
    assert operations.find(asked(asked_by(0))) is None
    assert operations.find(asked(asked_by(1))) is not None


def carried_without_answers(monkeypatch: pytest.MonkeyPatch) -> Operations:
    operations = Operations()
    operations.begin(asked("granted")).answer = ANSWER
    operations.begin(asked("silent")).answer = LeaseAnswer()
    operations.begin(asked("failed")).error = ("Unconfirmed", "genrm did not answer")
    monkeypatch.setattr(_operations, "newest_within", lambda *_: 0)
    return Operations(json.loads(json.dumps(operations.carry())))


@pytest.mark.parametrize(
    ("operation_id", "kind", "text"),
    [
        ("granted", "Permanent", "carried out long ago and is not carried out again"),
        ("failed", "Unconfirmed", "failed long ago"),
    ],
)
def test_an_operation_whose_answer_is_gone_is_not_carried_out_again(
    monkeypatch: pytest.MonkeyPatch, operation_id: str, kind: str, text: str
):
    again = carried_without_answers(monkeypatch).find(asked(operation_id))
    assert again is not None
    assert again.ended
    with pytest.raises(ApplicationError, match=text) as failed:
        again.result()
    assert failed.value.type == kind


def test_an_old_operation_whose_answer_says_nothing_is_answered_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
):
    again = carried_without_answers(monkeypatch).find(asked("silent"))
    assert again is not None
    assert again.result() == LeaseAnswer()


def test_the_id_of_an_old_operation_is_not_used_for_something_else_either(
    monkeypatch: pytest.MonkeyPatch,
):
    operations = carried_without_answers(monkeypatch)
    with pytest.raises(LeaseRefused, match="different fingerprint"):
        operations.find(asked("granted", role="teacher"))
