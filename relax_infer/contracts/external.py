"""Engines that somebody else started and that a role calls: what is asked, what is known."""

import re
from typing import Literal

from relax_infer.contracts.base import Message
from relax_infer.contracts.refs import RunRef, WeightsRef


class ExternalAsk(Message):
    """Ask of ``check_external`` and ``drain_external``."""

    run: RunRef
    model: str
    url: str
    weights: WeightsRef | None = None
    """What it has to hold; it is told to load them where it does not. None: its weights never
    change, and only their digest is compared."""
    digest: str | None = None
    """That its own must equal: of resident weights, as the model's engines computed it. None: not
    compared, the first look only asks whether it answers."""
    timeout: float = 300.0


class ExternalReport(Message):
    """What it said."""

    url: str
    answers: bool
    """It is healthy and says what it serves."""
    right: bool = False
    """It holds the asked weights, read back, and its canary computes."""
    weight_version: int | None = None
    weights_digest: str | None = None
    error: str | None = None


class ExternalWatch(Message):
    """Ask of ``watch_externals``: say when one of these is no longer what it is."""

    run: RunRef
    versions: dict[str, int | None]
    """Address and the version that it was last told."""
    compares: bool = True
    """Whether another version is a loss: not where weights never change."""
    patience: float = 15.0
    """Seconds without an answer after which one counts as lost."""


class ExternalLoss(Message):
    """Those that are lost, and why."""

    lost: dict[str, str]


class ExternalEngine(Message):
    """One that a role has adopted, or had."""

    model: str
    url: str
    operation: str
    """The scale operation that adopted it."""
    at: float
    """Unix seconds, workflow time: when it was adopted, or dropped."""
    state: Literal["ADOPTED", "DROPPED"] = "ADOPTED"
    """``DROPPED``: nobody calls it; it is not adopted again by itself."""
    weight_version: int | None = None
    weights_digest: str | None = None
    why: str | None = None
    """DROPPED: the reason."""


ADDRESS = re.compile(r"https?://[A-Za-z0-9.\-_\[\]:]+/?")
"""Of a server, without path, query or name of a user."""


def external_id(model: str, url: str) -> str:
    """Its engine id in the role's document."""
    return f"{model}/external-{url.partition('//')[2].rstrip('/').replace('/', '_')}"
