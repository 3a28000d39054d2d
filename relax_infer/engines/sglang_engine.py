"""One fenced SGLang server for people who run it themselves: without Ray, Temporal or a lease."""

import socket
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from relax_infer.contracts.engines import (
    BundleBinding,
    EngineGroupSpec,
    EngineOperation,
    OffloadKind,
    ReleaseEvidence,
    ReplicaReport,
    Role,
)
from relax_infer.contracts.failures import (
    PermanentError,
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.weights import WeightTransport
from relax_infer.engines.actor import EngineActor, Kind
from relax_infer.engines.host_processes import this_host
from relax_infer.engines.static import (
    InferenceEngineSpec,
    backup_faults,
    validate_static_server_args,
)
from relax_infer.machines import ReplicaState

_HOST = "127.0.0.1"
_KINDS: dict[str, type[RelaxError]] = {
    each.kind: each for each in (PermanentError, TransientError, UnconfirmedError)
}


class SGLangEngine:
    """A server of this host with the fence of a run's engines: an address that answers only while
    it is awake, a strict drain, a release that is proved or an error.

    Not for two callers at once. Use it as an async context manager, which ends it with proof::

        async with SGLangEngine("/models/policy", name="mine") as engine:
            url = engine.get_url()
            await engine.release_memory_occupation()
            await engine.resume_memory_occupation()

    Whatever an earlier process of the same ``name`` and ``store`` left on this host is found by
    :meth:`init` and ended with proof first.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        name: str,
        store: str | Path = "relax-engines",
        role: Role = "rollout",
        gpus: Sequence[int] = (0,),
        device: Literal["cpu", "cuda"] = "cuda",
        offload: OffloadKind = "memory_saver",
        python: str | None = None,
        server_args: Mapping[str, str | int | float | bool | None] | None = None,
        launch_timeout: float = 300.0,
        drain_timeout: float = 120.0,
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder.
            name: of the engine on this host; two at once need two names.
            store: folder for request logs.
            role: genrm and teacher keep the checkpoint they were started with.
            gpus: ids of this host's devices; one rank each.
            offload: how it lets go: SGLang's release and resume, or a proved stop.
            python: interpreter of the server; None: this one.
            server_args: SGLang's flags without dashes; True is a bare flag.
            launch_timeout, drain_timeout: seconds.

        Raises:
            ValueError: flags under which a static engine could not keep its checkpoint, or any
                could not keep its weights while it sleeps.
        """
        self.spec = None if role == "rollout" else InferenceEngineSpec(role)
        """What a static engine may be asked; None for the policy's."""
        if self.spec is not None:
            validate_static_server_args(server_args or {})
        elif offload == "memory_saver" and (faults := backup_faults(server_args or {})):
            told = "; ".join(f"{flag}: {why}" for flag, why in faults.items())
            raise ValueError(f"server_args of an engine that sleeps: {told}.")
        bundles = tuple(
            BundleBinding(
                bundle=k, node_id=socket.gethostname(), node_ip=_HOST, gpu_id=g, host=this_host()
            )
            for k, g in enumerate(gpus)
        )
        self._group = EngineGroupSpec(
            run=f"alone-{name}",
            role=role,
            model=name,
            model_path=str(model_path),
            weight_source="STATIC" if self.spec else "ACTOR",
            replicas=1,
            gpus_per_replica=len(bundles),
            offload=offload,
            ray_gpu_fraction=0.0,
            placement_group="none",
            bundles=bundles,
            device=device,
            python=python,
            server_args=dict(server_args or {}),
            launch_timeout=launch_timeout,
            drain_timeout=drain_timeout,
            store=Path(store).absolute().as_uri(),
        )
        self._actor = EngineActor(self._group, 0)
        self._counter = seen.counter if (seen := self._actor.seen) else 0
        self._report: ReplicaReport | None = None

    async def __aenter__(self) -> Self:
        await self.init()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def init(self, weights: WeightsRef | None = None) -> str:
        """Start it, with ``weights`` where they are not those of the model; its address.

        Raises:
            PermanentError: the server exited; the text ends with its last words.
            UnconfirmedError: what an earlier one left cannot be proved gone; nothing was started.
        """
        await self._operate("onload", weights)
        return self._url

    def get_url(self) -> str | None:
        """The fenced address; None while it must not be called."""
        return self._report.base_url if self._report else None

    @property
    def model_path(self) -> str:
        """Hugging Face folder that it was made with."""
        return self._group.model_path

    async def pids(self) -> tuple[int, ...]:
        """Its processes, the one that listens first; empty where there is none."""
        return (await self._actor.describe()).pids

    async def health_process(self) -> bool | None:
        """Whether every process lives; None where there is none."""
        described = await self._actor.describe()
        if described.incarnation is None:
            return None
        return described.nodes[0].lost is None

    async def health_generate(self) -> bool:
        """Whether it is awake and has shown that it computes."""
        report = await self._actor.health()
        return report.state is ReplicaState.READY and report.error is None

    async def release_memory_occupation(self) -> ReleaseEvidence:
        """Close, drain strictly, let go of everything; on what evidence.

        Raises:
            UnconfirmedError: it could not be told; :meth:`shutdown` proves it by ending.
        """
        return await self._release("offload")

    async def resume_memory_occupation(self, weights: WeightsRef | None = None) -> str:
        """Take everything back, ``weights`` or those it had, check them, open; its address."""
        await self._operate("onload", weights)
        return self._url

    async def update_weights_from_disk(
        self, weights: WeightsRef, *, drain_deadline: float = 30.0
    ) -> str:
        """Load behind a closed gate, read back, open; its address.

        Args:
            drain_deadline: seconds in which what runs may end; then it is aborted.

        Raises:
            RuntimeError: the engine is static.
        """
        if self.spec is not None:
            self.spec.require_operation("update_weights_from_disk")
        return await self._update(weights, WeightTransport(drain_deadline=drain_deadline))

    async def update_weights_from_tensor(
        self,
        weights: WeightsRef,
        *,
        bucket_mb: float = 256,
        timeout: float = 300.0,
        drain_deadline: float = 30.0,
    ) -> str:
        """As from disk; the folder is read here, and its tensors are handed over in shared memory.
        Where that fails the engine reads the folder.

        Args:
            bucket_mb: MB of tensors in shared memory at once.
            timeout: seconds for all of them.
            drain_deadline: as from disk.
        """
        if self.spec is not None:
            self.spec.require_operation("update_weights_from_tensor")
        return await self._update(
            weights,
            WeightTransport(
                transport="tensor",
                bucket_mb=bucket_mb,
                timeout=timeout,
                drain_deadline=drain_deadline,
            ),
        )

    async def get_weight_version(self) -> int | None:
        """As read from the engine just now; None while its weights are not resident."""
        return (await self._actor.read_weights()).weight_version

    async def abort_requests(self, prefix: str = "") -> int:
        """End requests whose id begins with ``prefix``; how many, once they are gone."""
        return await self._actor.settle_requests(prefix, self._group.drain_timeout)

    async def shutdown(self) -> ReleaseEvidence:
        """End every process and prove it; once more proves it once more.

        Raises:
            UnconfirmedError: no proof could be had.
        """
        return await self._release("stop")

    async def _update(self, weights: WeightsRef, transport: WeightTransport) -> str:
        group = self._group.model_copy(update={"weights": transport})
        await self._operate("load_weights", weights, group)
        return self._url

    @property
    def _url(self) -> str:
        url = self.get_url()
        if url is None:
            raise UnconfirmedError(f"Engine {self._group.model} is awake and has no address.")
        return url

    async def _release(self, kind: Kind) -> ReleaseEvidence:
        evidence = await self._operate(kind)
        assert evidence is not None
        return evidence

    async def _operate(
        self, kind: Kind, weights: WeightsRef | None = None, group: EngineGroupSpec | None = None
    ) -> ReleaseEvidence | None:
        self._counter += 1
        grant = str(uuid.uuid4())
        outcome = await self._actor.operate(
            kind,
            EngineOperation(
                group=group or self._group,
                operation_id=grant,
                fence=FenceToken(counter=self._counter, grant_id=grant),
                weights=weights,
            ),
        )
        self._report = outcome.report
        if (error := outcome.report.error) is not None:
            kind_of_error, _, text = error.partition(": ")
            if kind_of_error in _KINDS:
                raise _KINDS[kind_of_error](text)
            raise UnconfirmedError(error)
        return outcome.evidence
