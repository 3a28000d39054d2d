"""What is asked of a living cluster before a run, and what its nodes answer."""

from pydantic import Field

from relax_infer.contracts.base import Message
from relax_infer.engines.orphans import Orphan, Unrecorded
from relax_infer.placement.room import NodeRoom


class Wanted(Message):
    """Ask of every node with GPUs."""

    store: str
    """fsspec URL of staging and checkpoints."""
    models: tuple[str, ...]
    """Model folders that engines and trainer read."""
    ports: int
    """That servers of one node listen on at once."""
    files: tuple[str, ...] = ()
    """Files of problems, by path or fsspec URL."""
    cluster: str = ""
    """Address of Ray's control plane."""
    frontless: tuple[str, ...] = ()
    """Runs that have GPUs and no front: a router of theirs is in files alone."""


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


class RouterFacts(Message):
    """A router that a run's front says it has."""

    run: str
    url: str
    """Empty: nobody says where it is."""
    pid: int | None = None
    fault: str | None = None
    """Why it counts as not reachable; None: it answers."""


class NodeFacts(Message):
    """What one node says of itself."""

    node_id: str
    node_ip: str
    silent: str | None = None
    """Why nothing else is known."""
    processes: tuple[GpuProcess, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    """Engines that may live on its devices, of any run."""
    unrecorded: tuple[Unrecorded, ...] = ()
    port_fault: str | None = None
    """Why the wanted ports cannot be had; None: they were free a moment ago."""
    disk_free: int | None = None
    """Bytes where the store is; None: not on this node's disks."""
    shared_memory_free: int | None = None
    """Bytes; None: it has none that is known."""
    models: dict[str, int | None] = Field(default_factory=dict)
    """Bytes of weights in each wanted folder; None: there is no such folder."""
    files: dict[str, str | None] = Field(default_factory=dict)
    """Why a wanted file cannot be read; None: it can."""
    router: str | None = None
    """Version of sglang-router."""
    router_fault: str | None = None
    """Why it does not start."""
    routers: tuple[RouterFacts, ...] = ()
    """Those that files of this host record, of runs without a front."""


class ActorFacts(Message):
    """An actor of a run that answers for an engine, or for one of its trainer's ranks."""

    run: str
    actor: str
    holds: tuple[str, ...]
    """Incarnations of an engine, or its own pid; none: it answers for nothing that lives."""
    silent: bool = False
    """It did not answer; what it holds is not known."""


class ClusterFacts(Message):
    """The whole cluster."""

    nodes: tuple[NodeRoom, ...]
    facts: tuple[NodeFacts, ...]
    """Of the nodes with GPUs."""
    accelerators: bool
    """Whether any node's GPUs are real ones, as far as Ray knows."""
    groups: tuple[str, ...]
    """Names of the placement groups that are there."""
    actors: tuple[ActorFacts, ...] = ()
    routers: tuple[RouterFacts, ...] = ()
    files: dict[str, str | None] = Field(default_factory=dict)
    """Of wanted files as the process sees them that looked at the cluster, on one of its nodes."""
