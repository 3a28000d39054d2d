"""How new weights reach the engines, and what engines say to the sender of a group."""

from typing import Annotated, Literal

from pydantic import Field

from relax_infer.contracts.base import Message
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef

Transport = Literal["disk", "tensor", "process_group"]


class WeightTransport(Message):
    """How the engines of the policy get new weights."""

    transport: Transport = "disk"
    """disk: each engine reads the exported folder. tensor: a process beside each engine reads it
    and hands over tensors in shared memory. process_group: trainer rank 0 broadcasts to the ranks
    of all engines, nccl on CUDA and gloo on a CPU."""
    bucket_mb: Annotated[float, Field(gt=0, le=16_384)] = 256
    """MB (10^6 bytes) that are on their way at once, unless one tensor is larger."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds for the tensors of one version, from the first to the last; the wait for engines
    that still drain is not in it. An engine that has not got them by then reads the folder."""
    drain_deadline: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds that requests may take to end before an engine that is up takes new weights; it
    admits no others meanwhile. What is left then is aborted; 0: at once."""
    verify: bool = True
    """Engines that read the folder compare it with the digest that the trainer published, which
    costs a SHA-256 of all weights; false: the store has checksums of its own."""

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 1_000_000)


class TensorPlan(Message):
    """One tensor of a bucket, by its Hugging Face name."""

    name: str
    dtype: str
    """As PyTorch names it, such as ``float32``."""
    shape: tuple[int, ...]


class SeatAsk(Message):
    """An engine that is fenced and drained asks the sender for its place in the group."""

    key: str
    """Operation id; the same for every engine of the group."""
    fence: FenceToken
    """The engines' grant."""
    weights: WeightsRef
    member: str
    """Engine id."""
    ranks: int
    members: tuple[str, ...]
    """Every engine that asks or declines under this key."""
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int
    patience: float
    """Seconds to wait for the other engines."""
    timeout: float
    """Seconds from the complete group to the last tensor."""


class Seat(Message):
    """Where and as whom an engine joins, and what it will be sent."""

    host: str
    port: int
    group: str
    """Never used for another attempt."""
    world: int
    """Ranks of all engines that came, and the sender, which is rank 0."""
    rank_offset: int
    """Of the engine's first rank."""
    buckets: tuple[tuple[TensorPlan, ...], ...]
    """Broadcast one after another, each as one tensor of bytes."""
