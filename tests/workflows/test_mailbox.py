"""What workflows remember of their answers, without Temporal."""

import json
from typing import Any

import pytest
from pydantic import BaseModel
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.engines import GroupSnapshot, ReplicaReport
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.refs import StagedRef
from relax_infer.machines import GroupState, ReplicaState
from workflows import _mailbox
from workflows._mailbox import Mailbox

REPLICAS = 64


class Desk:
    """A mailbox whose answers go nowhere, and who asks it."""

    def __init__(self, mail: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mail, self.sent, self.done = mail, list[Answer](), list[str]()

        async def send(asker: str, answer: Answer) -> None:
            self.sent.append(answer)

        monkeypatch.setattr(Mailbox, "_send", staticmethod(send))

    async def ask(self, operation_id: str, renew: Any = None) -> Answer:
        ask = Ask(operation_id=operation_id, asker="role", method="offload", payload={})
        await self.mail.serve(ask, self._carry_out, renew)
        return self.sent[-1]

    async def _carry_out(self, ask: Ask) -> BaseModel:
        self.done.append(ask.operation_id)
        if ask.operation_id.startswith("fails"):
            raise ApplicationError("no answer", type="Unconfirmed")
        return result(len(self.done))


def result(number: int) -> RoleResult:
    """What a group of many replicas answers."""
    fence = FenceToken(counter=number, grant_id=f"run-1.step-{number}:{'0' * 36}:genrm:activate")
    reports = tuple(
        ReplicaReport(
            replica=k,
            engine_id=f"policy/replica-{k}",
            state=ReplicaState.READY,
            base_url=f"http://10.0.0.{k}:30000",
            incarnation="0" * 36,
            weight_version=number,
            weights_digest="0" * 64,
            fence=fence,
        )
        for k in range(REPLICAS)
    )
    return RoleResult(
        state="READY",
        weight_version=number,
        weights_digest="0" * 64,
        evidence=(StagedRef(uri="s3://bucket/run-1/evidence", sha256="0" * 64, rows=REPLICAS),),
        holders=tuple(r.engine_id for r in reports),
        snapshot=GroupSnapshot(
            role="rollout",
            model="policy",
            state=GroupState.READY,
            weight_source="ACTOR",
            replicas=reports,
            generations=(1,) * REPLICAS,
            number=number,
        ),
    )


def continued(mail: Mailbox) -> Mailbox:
    return Mailbox(json.loads(json.dumps(mail.carry())))


@pytest.mark.asyncio
async def test_a_full_window_of_answers_fits_into_what_temporal_carries(
    monkeypatch: pytest.MonkeyPatch,
):
    window = _mailbox._REMEMBERED
    desk = Desk(Mailbox(), monkeypatch)
    for number in range(window):
        await desk.ask(f"run-1.lease-default.{number}.offload@policy")
    carried = desk.mail.carry()
    assert len(json.dumps(carried)) < 200 * 1024
    assert continued(desk.mail).carry() == carried
    desk.mail = continued(desk.mail)
    for number in (0, window // 2, window - 1):
        await desk.ask(f"run-1.lease-default.{number}.offload@policy")
    assert len(desk.done) == window
    await desk.ask("one more")
    await desk.ask("run-1.lease-default.0.offload@policy")
    assert len(desk.done) == window + 2, "the oldest is forgotten, and no other"


@pytest.mark.asyncio
async def test_who_asks_again_hears_the_same_without_old_news(monkeypatch: pytest.MonkeyPatch):
    desk = Desk(Mailbox(), monkeypatch)
    first = await desk.ask("op-1")
    assert RoleResult.model_validate(first.result).snapshot is not None
    for _ in range(2):
        again = await desk.ask("op-1")
        assert again.ok
        assert RoleResult.model_validate(again.result) == result(1).model_copy(
            update={"snapshot": None}
        )
        desk.mail = continued(desk.mail)

    def renew(answer: Answer) -> Answer:
        return answer.model_copy(update={"result": {**answer.result, "state": "SLEEPING"}})

    assert (await desk.ask("op-1", renew)).result["state"] == "SLEEPING"
    assert desk.done == ["op-1"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("operation_id", "text"),
    [("works", "is not carried out again"), ("fails", "failed long ago")],
)
async def test_what_was_asked_long_ago_is_not_done_twice(
    monkeypatch: pytest.MonkeyPatch, operation_id: str, text: str
):
    desk = Desk(Mailbox(), monkeypatch)
    await desk.ask(operation_id)
    monkeypatch.setattr(_mailbox, "newest_within", lambda *_: 0)
    desk.mail = continued(desk.mail)
    again = await desk.ask(operation_id, renew=pytest.fail)
    assert (again.ok, again.kind) == (False, "Unconfirmed")
    assert text in again.error
    assert desk.done == [operation_id]


@pytest.mark.asyncio
async def test_a_mailbox_that_remembers_nothing_asks_its_handler_again(
    monkeypatch: pytest.MonkeyPatch,
):
    desk = Desk(Mailbox(remembers=False), monkeypatch)
    await desk.ask("op-1")
    await desk.ask("op-1")
    assert desk.done == ["op-1", "op-1"]
    assert desk.mail.carry() == Mailbox().carry()
