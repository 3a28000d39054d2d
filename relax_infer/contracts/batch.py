"""What the data activities of a step take and give: references and small counts."""

from typing import Any

from pydantic import Field

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.refs import RunRef, StagedRef
from relax_infer.contracts.run import BatchMetrics, FrontAddress


class PhaseRequest(Message):
    """Generate, judge or teach: the phase reads its input, asks only for what no shard holds."""

    run: RunRef
    step: int
    weight_version: int
    """Generation: the version that every sample must carry."""
    front: FrontAddress
    groups: tuple[EngineGroupSpec, ...]
    """Engines that may have requests of an earlier attempt in flight."""
    source: StagedRef | None = None
    """Generated samples; None for the generation itself."""


class PhaseResult(Message):
    """One compacted, immutable file."""

    staged: StagedRef
    attempt: int
    requested: int
    """Requests that this attempt sent; what earlier attempts finished is not among them."""
    reused_groups: int
    settled: int = 0
    """Requests of earlier attempts that were aborted and confirmed gone before asking again."""


class WriteBackRequest(Message):
    run: RunRef
    step: int
    generated: StagedRef
    judged: StagedRef | None
    taught: StagedRef | None


class WriteBackResult(Message):
    """The validated batch."""

    staged: StagedRef
    dropped_groups: int = 0
    drop_reasons: dict[str, int] = Field(default_factory=dict)


class PublishRequest(Message):
    run: RunRef
    step: int
    scored: StagedRef


class PublishResult(Message):
    """What TransferQueue was seen to hold after the put."""

    partition: str
    keys: int
    digest: str
    """SHA-256 over keys in order and every published column, computed from the rows read back."""


class FinaliseRequest(Message):
    run: RunRef
    step: int
    scored: StagedRef
    published: PublishResult
    dropped_groups: int = 0
    drop_reasons: dict[str, int] = Field(default_factory=dict)


class FinaliseResult(Message):
    metrics: BatchMetrics
    export: StagedRef
    """JSON Lines of the scored samples, for people."""


class EvaluateRequest(Message):
    run: RunRef
    step: int
    weight_version: int
    front: FrontAddress
    groups: tuple[EngineGroupSpec, ...] = ()
    """Engines that may have requests of an earlier attempt in flight."""


class Judging(Message):
    """How a gateway makes a judge's request of messages."""

    template_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """Model id to what its chat template is given besides the messages."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Of messages that do not say; None: the gateway's own."""


class RegistryPush(Message):
    """One role's snapshot for the gateway; an older (term, revision) is refused there."""

    run: RunRef
    role: str
    term: int
    document: dict[str, object]
    """Schema 2 document."""
    router_workers: tuple[str, ...] | None = None
    """Addresses that the router must hold, exactly, before this is pushed; None: leave it."""
    router_others: tuple[str, ...] | None = None
    """Of engines of others, that it may hold besides: it is told of them, and holds up nothing
    where one does not answer. None: leave it."""
    judging: Judging | None = None
    """Of the recipe, with a judge's role; the activity fills it in. None: leave it."""
