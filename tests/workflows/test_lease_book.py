"""The rules of the lease, without Temporal."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_infer.contracts.lease import LeaseRequest
from relax_infer.machines import LEASE, BatchState, IllegalTransition, LeaseEvent, LeaseState
from workflows._lease_book import COMMITS_REMEMBERED, LeaseBook, LeaseRefused

ROLES = ("rollout", "genrm", "teacher", "trainer")


def request(method: str, **fields: object) -> LeaseRequest:
    return LeaseRequest.model_validate({"operation_id": "op", "method": method, **fields})


def book_with_batch(batch: str = "step-1") -> LeaseBook:
    book = LeaseBook("default", ROLES)
    book.check(request("begin_batch", batch=batch))
    book.begin_batch(batch)
    return book


def bring_up(book: LeaseBook, role: str) -> None:
    book.grant(role, f"grant-{book.fence_counter}", at=0.0)
    book.record(role, LeaseEvent.ONLOAD_CONFIRMED, at=0.0)


def take_down(book: LeaseBook, role: str) -> None:
    book.record(role, LeaseEvent.DRAIN_STARTED, at=0.0)
    book.record(role, LeaseEvent.RELEASE_CONFIRMED, at=0.0)


def refused(book: LeaseBook, asked: LeaseRequest) -> str:
    with pytest.raises(LeaseRefused) as caught:
        book.check(asked)
    return str(caught.value)


def test_an_unknown_role_is_refused_at_registration():
    with pytest.raises(LeaseRefused, match="Unknown inference role"):
        LeaseBook("default", ("rollout", "worker"))


@pytest.mark.parametrize("batch", [None, "", " step-1", "step-1 "])
def test_a_batch_id_must_be_trimmed_text(batch: str | None):
    assert "rollout_id" in refused(LeaseBook("default", ROLES), request("begin_batch", batch=batch))


def test_a_second_batch_waits_for_the_pending_one():
    book = book_with_batch()
    assert "Only one pending closed batch" in refused(book, request("begin_batch", batch="step-2"))
    book.check(request("begin_batch", batch="step-1"))


def test_a_batch_begins_only_when_every_role_sleeps():
    book = LeaseBook("default", ROLES)
    bring_up(book, "teacher")
    assert "teacher (ACTIVE)" in refused(book, request("begin_batch", batch="step-1"))


def test_a_role_is_activated_only_for_a_pending_batch():
    book = LeaseBook("default", ROLES)
    assert "none is pending" in refused(book, request("activate", role="genrm"))


def test_no_role_is_activated_while_another_holds():
    book = book_with_batch()
    bring_up(book, "rollout")
    text = refused(book, request("activate", role="genrm"))
    assert "leases held by rollout (ACTIVE)" in text
    with pytest.raises(LeaseRefused):
        book.grant("genrm", "g", at=0.0)


def test_an_offload_is_refused_while_the_role_is_blocked():
    book = book_with_batch()
    bring_up(book, "rollout")
    book.record("rollout", LeaseEvent.DRAIN_STARTED, at=0.0)
    book.record("rollout", LeaseEvent.TIMED_OUT, at=0.0, reason="no answer")
    text = refused(book, request("deactivate", role="rollout"))
    assert text == "Cannot offload rollout in BLOCKED; lease remains reserved"


def test_blocked_is_left_only_by_proof_or_a_person():
    leaving = {event for (state, event) in LEASE.transitions if state is LeaseState.BLOCKED}
    assert leaving == {
        LeaseEvent.ACTIVE_PROVED,
        LeaseEvent.RELEASE_PROVED,
        LeaseEvent.RESOLVED_BY_OPERATOR,
    }


def test_resolving_a_blocked_role_needs_who_why_and_the_confirmation():
    book = book_with_batch()
    bring_up(book, "rollout")
    book.record("rollout", LeaseEvent.OPERATION_FAILED, at=0.0, reason="died")
    assert "who looked" in refused(book, request("resolve", confirm_released=True))
    assert "confirm_released" in refused(book, request("resolve", who="ada", why="looked"))
    book.check(request("resolve", who="ada", why="looked", confirm_released=True))


def test_nothing_is_committed_while_a_role_holds():
    book = book_with_batch()
    bring_up(book, "teacher")
    text = refused(book, request("commit_batch", batch="step-1"))
    assert "Cannot commit before inference offload" in text


def test_a_failed_batch_is_never_committed_and_keeps_its_first_cause():
    book = book_with_batch()
    book.fail_batch("the judge died")
    book.fail_batch("and then this")
    assert book.batch is not None
    assert book.batch.error == "the judge died"
    assert "the judge died" in refused(book, request("commit_batch", batch="step-1"))
    assert "the judge died" in refused(book, request("begin_batch", batch="step-2"))


def test_a_role_of_a_failed_batch_may_still_let_go():
    book = book_with_batch()
    bring_up(book, "rollout")
    book.fail_batch("no")
    book.check(request("deactivate", role="rollout", batch="step-1"))


def test_failing_a_batch_needs_a_cause():
    assert "cause" in refused(book_with_batch(), request("fail_batch", batch="step-1", message=" "))


def test_the_trainer_gets_the_gpus_only_for_a_committed_batch():
    book = book_with_batch()
    assert "pending" in refused(
        book, request("acquire", role="trainer", purpose="train", batch="step-1")
    )
    book.commit_batch()
    book.check(request("acquire", role="trainer", purpose="train", batch="step-1"))
    text = refused(book, request("acquire", role="trainer", purpose="train", batch="step-2"))
    assert "not committed" in text


def test_student_scoring_needs_the_released_generation_and_every_role_asleep():
    book = book_with_batch()
    assert "offload" in refused(book, request("begin_student_scoring", batch="step-1"))
    book.note_rollout_released()
    bring_up(book, "genrm")
    assert "every inference role" in refused(book, request("begin_student_scoring", batch="step-1"))


def test_who_asks_late_about_a_batch_that_was_given_up_still_hears_why():
    book = book_with_batch()
    assert book.failure_of("step-1") is None
    book.fail_batch("the judge died")
    assert book.failure_of("step-1") == "the judge died"
    book.abandon_batch()
    assert LeaseBook.restore(book.carry()).failure_of("step-1") == "the judge died"
    book.begin_batch("step-1")
    assert book.failure_of("step-1") is None
    book.abandon_batch()
    assert book.failure_of("step-1") == "a person gave it up"


def test_given_up_batches_are_remembered_up_to_a_bound():
    book = LeaseBook("default", ROLES)
    for number in range(COMMITS_REMEMBERED + 1):
        book.begin_batch(f"step-{number}")
        book.abandon_batch()
    assert book.failure_of("step-0") is None
    assert book.failure_of("step-1") is not None
    assert len(book.given_up) == COMMITS_REMEMBERED


def test_of_batches_that_were_given_up_long_ago_the_cause_is_short():
    book = LeaseBook("default", ROLES)
    for number in range(100):
        book.begin_batch(f"step-{number}")
        book.fail_batch("the judge died: " + "x" * 5000)
        book.abandon_batch()
    assert len(book.failure_of("step-0") or "") == 80
    assert len(book.failure_of("step-99") or "") > 5000


def test_student_scoring_wants_a_release_of_its_own():
    book = book_with_batch()
    book.note_rollout_released()
    assert book.rollout_is_over("step-1")
    assert not book.rollout_is_over("step-2")
    book.note_student_scoring()
    assert not book.rollout_is_over("step-1")


def test_commits_are_remembered_up_to_a_bound():
    book = LeaseBook("default", ROLES)
    for number in range(COMMITS_REMEMBERED + 1):
        book.begin_batch(f"step-{number}")
        book.commit_batch()
    assert "step-0" not in book.committed
    assert len(book.committed) == COMMITS_REMEMBERED


def test_a_book_survives_continue_as_new():
    book = book_with_batch()
    bring_up(book, "rollout")
    book.abandon_batch()
    book.begin_batch("step-2")
    book.fail_batch("no")
    again = LeaseBook.restore(book.carry())
    assert again.carry() == book.carry()


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever is asked and whatever happens, in any order: the promises hold."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook("default", ROLES)
        self.highest = 0
        self.commits = 0
        self.begun = 0

    @rule(role=st.sampled_from(ROLES))
    def grant(self, role: str) -> None:
        try:
            fence = self.book.grant(role, "g", at=0.0)
        except (LeaseRefused, IllegalTransition):
            return
        assert fence.counter > self.highest
        self.highest = fence.counter

    @rule(role=st.sampled_from(ROLES), event=st.sampled_from(list(LeaseEvent)))
    def something_happens(self, role: str, event: LeaseEvent) -> None:
        state = self.book.roles[role].state
        if event is not LeaseEvent.GRANTED and LEASE.allows(state, event):
            if event is LeaseEvent.MEMORY_LOST and self.book.holder is not None:
                return  # only a lease that starts anew loses its memory
            self.book.record(role, event, at=0.0, reason="because")

    @rule()
    def begin(self) -> None:
        asked = request("begin_batch", batch=f"step-{self.begun}")
        try:
            self.book.check(asked)
        except LeaseRefused:
            return
        self.book.begin_batch(f"step-{self.begun}")

    @precondition(lambda self: self.book.batch is not None)
    @rule(fails=st.booleans())
    def end(self, fails: bool) -> None:
        batch = self.book.batch
        assert batch is not None
        asked = request("fail_batch" if fails else "commit_batch", batch=batch.batch, message="m")
        try:
            self.book.check(asked)
        except LeaseRefused:
            return
        if fails:
            self.book.fail_batch("m")
        elif batch.batch not in self.book.committed:
            assert self.book.asleep
            assert batch.state is BatchState.PENDING
            self.book.commit_batch()
            self.begun += 1

    @invariant()
    def at_most_one_role_holds_the_pool(self) -> None:
        holders = [r for r, lease in self.book.roles.items() if LEASE.holds(lease.state)]
        assert len(holders) <= 1

    @invariant()
    def a_batch_is_committed_once(self) -> None:
        assert len(set(self.book.committed)) == len(self.book.committed)


AnyOrderOfEvents.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
