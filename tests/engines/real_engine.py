"""One real SGLang server behind its fence, operated by its actor in this process, without Ray."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.engines import EngineOperation
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines import read_request_log
from relax_infer.engines.actor import EngineActor, ReplicaOutcome
from relax_infer.engines.control import EngineControl
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.seats import Sender
from relax_infer.machines import ReplicaState
from tests.engines.checkpoints import group_spec, make_checkpoint


class RealEngine:
    """An engine's actor, called in this process, with tokens and operation ids that grow."""

    def __init__(self, folder: Path, sender: Sender | None = None, gpus: int = 1) -> None:
        self.folder = folder
        (bundle,) = group_spec(folder).bundles
        bundles = tuple(bundle.model_copy(update={"bundle": k, "gpu_id": k}) for k in range(gpus))
        self.spec = group_spec(folder, gpus_per_replica=gpus, bundles=bundles)
        self.actor = EngineActor(self.spec, 0, sender=sender)
        self.counter = 0

    def weights(self, version: int) -> WeightsRef:
        folder = self.folder / f"version-{version}"
        return WeightsRef(version=version, uri=f"file://{folder}", digest="")

    async def operate(self, kind: Any, version: int | None = None, **more: Any) -> ReplicaOutcome:
        self.counter += 1
        operation: dict[str, Any] = {
            "group": self.spec,
            "operation_id": f"op-{self.counter}",
            "fence": FenceToken(counter=self.counter, grant_id=f"grant-{self.counter}"),
            "weights": None if version is None else self.weights(version),
        }
        return await self.actor.operate(kind, EngineOperation(**{**operation, **more}))

    async def ready(self, version: int) -> str:
        """The address of the engine, awake with these weights."""
        outcome = await self.operate("onload", version)
        assert outcome.report.error is None
        assert outcome.report.state is ReplicaState.READY
        assert outcome.report.base_url is not None
        return outcome.report.base_url

    async def control(self) -> EngineControl:
        return EngineControl(Path((await self.actor.describe()).socket or ""))

    async def log(self) -> list[dict[str, Any]]:
        path = (await self.actor.describe()).request_log
        assert path is not None
        return list(read_request_log(Path(path)))


@asynccontextmanager
async def real_engine(
    folder: Path, sender: Sender | None = None, *, gpus: int = 1, **sizes: int
) -> AsyncIterator[RealEngine]:
    """Not started yet, with the weights ``version-0`` and ``version-1``; gone at the end."""
    for version in (0, 1):
        make_checkpoint(folder / f"version-{version}", seed=version, **sizes)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as short:
        patch.setattr(tempfile, "tempdir", short)
        patch.setenv("RELAX_HOME", str(folder))
        made = RealEngine(folder, sender, gpus)
        try:
            yield made
        finally:
            made.spec = made.spec.model_copy(update={"drain_timeout": 10.0})
            await made.operate("stop")
            assert HolderFiles(made.spec, 0).holder() is None
