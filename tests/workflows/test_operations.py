"""Operation ids of the lease, without Temporal: what the same id gets when it comes again."""

import pytest
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LeaseAnswer, LeaseRequest
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
    "other", [{"role": "teacher"}, {"batch": "step-2"}, {"method": "acquire", "purpose": "eval"}]
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
