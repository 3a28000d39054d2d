"""What is asked of a living cluster before a run, and what its nodes answer."""

from pydantic import Field

from relax_infer.contracts.base import Message
from relax_infer.engines.orphans import Orphan
from relax_infer.placement.room import NodeRoom


class Wanted(Message):
    """Ask of every node with GPUs."""

    store: str
    """fsspec URL of staging and checkpoints."""
    models: tuple[str, ...]
    """Model folders that engines and trainer read."""
    ports: int
    """That servers of one node listen on at once."""


class GpuProcess(Message):
    """A process that computes on a device."""

    gpu: str
    """The node's own number of the device, or its UUID."""
    pid: int
    name: str
    mib: int | None
    """Device memory; None where the driver does not tell."""

    def __str__(self) -> str:
        memory = f", {self.mib} MiB" if self.mib is not None else ""
        return f"process {self.pid} {self.name} on GPU {self.gpu}{memory}"


class NodeFacts(Message):
    """What one node says of itself."""

    node_id: str
    node_ip: str
    silent: str | None = None
    """Why nothing else is known."""
    processes: tuple[GpuProcess, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    """Engines that may live on its devices, of any run."""
    port_fault: str | None = None
    """Why the wanted ports cannot be had; None: they were free a moment ago."""
    disk_free: int | None = None
    """Bytes where the store is; None: not on this node's disks."""
    shared_memory_free: int | None = None
    """Bytes; None: it has none that is known."""
    models: dict[str, int | None] = Field(default_factory=dict)
    """Bytes of weights in each wanted folder; None: there is no such folder."""
    router: str | None = None
    """Version of sglang-router."""


class ClusterFacts(Message):
    """The whole cluster."""

    nodes: tuple[NodeRoom, ...]
    facts: tuple[NodeFacts, ...]
    """Of the nodes with GPUs."""
    accelerators: bool
    """Whether any node's GPUs are real ones, as far as Ray knows."""
    groups: tuple[str, ...]
    """Names of the placement groups that are there."""
