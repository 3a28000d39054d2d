"""What one engine holds of its model, and whether it is what it was told to hold."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from relax_infer.contracts.engines import RESIDENT_TAGS, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines.canary import compare_canaries, take_canary
from relax_infer.engines.control import EngineControl
from relax_infer.engines.digest import checkpoint_dtype, expected_digest
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.process import local_path


class Resident:
    """Tags and weights of one replica's engine; nothing without one."""

    def __init__(self, engine_id: str, files: HolderFiles) -> None:
        self.tags: set[str] = set()
        """Resident ones of :data:`RESIDENT_TAGS`."""
        self.version: int | None = None
        """Version of the resident weights; None before any, and for weights without versions."""
        self.digest: str | None = None
        self._engine_id, self._files = engine_id, files
        self._folder: Path | None = None
        self._loaded = False
        """Whether weights were loaded since the last canary that serves as the reference."""

    def begin(self, folder: Path, version: int | None) -> None:
        """An engine was started from ``folder``: everything is resident."""
        self.tags, self._folder, self.version = set(RESIDENT_TAGS), folder, version
        self._loaded = True

    def forget(self) -> None:
        """The engine is gone."""
        self.tags.clear()
        self.version = self.digest = self._folder = None
        self._loaded = False

    def current(self, weights: WeightsRef | None) -> bool:
        return weights is None or weights.version == self.version

    async def resume(
        self, control: EngineControl, tags: Sequence[str], token: FenceToken, timeout: float
    ) -> None:
        # A resume without a release kills the server.
        missing = [tag for tag in tags if tag not in self.tags]
        if missing:
            await control.resume(missing, token, timeout)
            self.tags.update(missing)

    async def release(self, control: EngineControl, token: FenceToken, timeout: float) -> None:
        tags = [tag for tag in RESIDENT_TAGS if tag in self.tags]
        if tags:
            await control.release(tags, token, timeout)
            self.tags.clear()

    async def load(
        self, control: EngineControl, weights: WeightsRef, token: FenceToken, timeout: float
    ) -> None:
        folder = weights_folder(weights)
        await control.load(folder, weights.version, token, timeout)
        self._folder, self.version, self._loaded = folder, weights.version, True

    async def check_canary(self, control: EngineControl, timeout: float) -> None:
        """A prefill must come out as it did when these weights were loaded.

        The first one after a load becomes the reference; one of the same weights in an earlier
        incarnation is compared with it.
        """
        assert self.digest is not None
        now = await take_canary(control, self.digest, timeout)
        if (known := self._files.canary()) is not None:
            compare_canaries(known, now)
        if self._loaded:
            self._files.write_canary(now)
            self._loaded = False

    async def check_weights(self, control: EngineControl, spec: EngineGroupSpec) -> None:
        """Read version and digest back and compare them with what they must be.

        Raises:
            PermanentError: they are not.
            UnconfirmedError: they could not be read.
        """
        version = await control.weight_version()
        if version != self.version:
            raise PermanentError(
                f"Engine {self._engine_id} says weight version {version}; {self.version} was"
                f" loaded from {self._folder}."
            )
        digest = await control.weights_digest(spec.launch_timeout)
        expected = await asyncio.to_thread(self._expected_digest, spec)
        if expected is not None and digest != expected:
            raise PermanentError(
                f"Engine {self._engine_id} holds weights of digest {digest} as version {version};"
                f" the files in {self._folder} make {expected}.",
                cure="The load was not what it seemed: do not sample from this engine.",
            )
        self.digest = digest

    def _expected_digest(self, spec: EngineGroupSpec) -> str | None:
        folder = self._folder
        if spec.device != "cpu" or spec.gpus_per_replica != 1 or folder is None:
            return None
        dtype = spec.server_args.get("dtype") or checkpoint_dtype(Path(spec.model_path))
        return expected_digest(folder, str(dtype))


def weights_folder(weights: WeightsRef) -> Path:
    folder = local_path(weights.uri)
    if folder is None:
        raise PermanentError(
            f"Weights version {weights.version} are at {weights.uri}, which is no folder of this"
            " host.",
            cure="Engines load from a folder: set staging.url to a path that every host mounts.",
        )
    return folder
