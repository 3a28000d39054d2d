"""The admission gate: contract section 5.1."""

import asyncio
import threading

import pytest

from relax_infer.gateway.gate import AdmissionClosed, AdmissionGate


def opened() -> AdmissionGate:
    gate = AdmissionGate()
    gate.open()
    return gate


def test_it_starts_closed_and_drained():
    assert AdmissionGate().status() == {"ready": False, "inflight": 0, "backend_drained": True}


def test_a_closed_gate_admits_nobody_and_counts_nobody():
    gate = AdmissionGate()
    with pytest.raises(AdmissionClosed):
        gate.enter()
    assert gate.status() == {"ready": False, "inflight": 0, "backend_drained": True}


def test_an_admission_takes_the_drained_word_back_and_finishing_does_not_restore_it():
    gate = opened()
    token = gate.enter()
    assert gate.status() == {"ready": True, "inflight": 1, "backend_drained": False}
    gate.finish(token)
    assert gate.status() == {"ready": True, "inflight": 0, "backend_drained": False}


def test_closing_cancels_every_active_request_once_and_keeps_it_in_flight():
    gate = opened()
    cancelled: list[str] = []
    first = gate.enter(lambda: cancelled.append("first"))
    gate.enter(lambda: cancelled.append("second"))
    gate.finish(first)
    gate.close()
    gate.close()
    assert cancelled == ["second"]
    assert gate.status() == {"ready": False, "inflight": 1, "backend_drained": False}


def test_a_close_that_cancels_nobody_leaves_that_to_a_later_one():
    gate = opened()
    cancelled: list[str] = []
    first = gate.enter(lambda: cancelled.append("first"))
    gate.enter(lambda: cancelled.append("second"))
    gate.close(cancel=False)
    assert cancelled == []
    with pytest.raises(AdmissionClosed):
        gate.enter()
    gate.finish(first)
    gate.close()
    gate.close(cancel=False)
    assert cancelled == ["second"]
    assert gate.status() == {"ready": False, "inflight": 1, "backend_drained": False}


def test_a_cancel_that_raises_leaves_no_other_request_uncancelled(
    caplog: pytest.LogCaptureFixture,
):
    gate = opened()
    cancelled: list[str] = []

    def broken() -> None:
        raise RuntimeError("no loop")

    gate.enter(lambda: cancelled.append("first"))
    gate.enter(broken)
    gate.enter(lambda: cancelled.append("third"))
    gate.close()
    assert cancelled == ["first", "third"]
    assert (gate.ready, gate.inflight) == (False, 3)
    assert "no loop" in caplog.text


def test_a_cancel_callback_may_finish_its_own_request():
    gate = opened()
    tokens: list[int] = []
    tokens.append(gate.enter(lambda: gate.finish(tokens[0])))
    gate.close()
    assert gate.inflight == 0


def test_it_does_not_open_over_active_requests_or_an_undrained_engine():
    gate = opened()
    token = gate.enter()
    gate.close()
    with pytest.raises(RuntimeError, match="1 requests"):
        gate.open()
    gate.finish(token)
    with pytest.raises(RuntimeError, match="not confirmed drained"):
        gate.open()
    gate.confirm_backend_drained()
    gate.open()
    assert gate.ready


def test_opening_an_open_gate_changes_nothing_even_with_requests_in_flight():
    gate = opened()
    gate.enter()
    gate.open()
    assert gate.status() == {"ready": True, "inflight": 1, "backend_drained": False}


def test_nobody_calls_an_engine_drained_behind_an_open_gate():
    with pytest.raises(RuntimeError, match="open"):
        opened().confirm_backend_drained()


def test_finishing_twice_counts_once():
    gate = opened()
    token, _ = gate.enter(), gate.enter()
    gate.finish(token)
    gate.finish(token)
    assert gate.inflight == 1


def test_callers_that_left_are_counted_apart():
    gate = opened()
    gate.finish(gate.enter(), completed=False)
    gate.finish(gate.enter())
    assert gate.abandoned == 1


def test_the_waits_say_in_time_what_is_still_there():
    gate = opened()
    token = gate.enter()
    gate.close()
    with pytest.raises(TimeoutError, match="'inflight': 1"):
        gate.wait_requests_closed(0.01)
    gate.finish(token)
    gate.wait_requests_closed(0.01)
    with pytest.raises(TimeoutError, match="'backend_drained': False"):
        gate.wait_drained(0.01)
    gate.confirm_backend_drained()
    gate.wait_drained(0.01)


async def test_a_loop_can_wait_in_a_thread_while_it_finishes_requests():
    gate = opened()
    token = gate.enter()
    gate.close()
    waiting = asyncio.create_task(asyncio.to_thread(gate.wait_drained, 10))
    gate.finish(token)
    gate.confirm_backend_drained()
    await waiting


def test_many_threads_never_enter_after_the_close_returned():
    gate = opened()
    closed = threading.Event()
    late: list[int] = []

    def ask() -> None:
        while True:
            known_closed = closed.is_set()
            try:
                token = gate.enter()
            except AdmissionClosed:
                return
            if known_closed:
                late.append(token)
            gate.finish(token)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.close()
    closed.set()
    for thread in threads:
        thread.join(10)
    assert late == []
    assert gate.inflight == 0
