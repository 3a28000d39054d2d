"""What one engine holds of its model, and whether it is what it was told to hold."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from relax_infer.contracts.engines import RESIDENT_TAGS, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError, RelaxError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines.canary import compare_canaries, take_canary
from relax_infer.engines.control import EngineControl
from relax_infer.engines.digest import checkpoint_dtype, expected_digest
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.host_tensors import OtherWeights, SentDigest, host_tensors
from relax_infer.engines.process import local_path
from relax_infer.engines.seats import Place
from relax_infer.engines.weight_change import WeightChange

log = logging.getLogger(__name__)


class Resident:
    """Tags and weights of one replica's engine; nothing without one."""

    def __init__(self, engine_id: str, files: HolderFiles) -> None:
        self.tags: set[str] = set()
        """Resident ones of :data:`RESIDENT_TAGS`."""
        self.version: int | None = None
        """Version of the resident weights; None before any, and for weights without versions."""
        self.digest: str | None = None
        """Of the resident weights, as the engine told it first; None until it was read. Only a load
        changes it: a release and a resume must bring back the same bytes."""
        self.note: str | None = None
        """Why the last weights came from disk and not by the transport of the recipe."""
        self._unknown = False
        """Whether a load has begun and not ended well: the weights may be mixed."""
        self._engine_id, self._files = engine_id, files
        self._folder: Path | None = None
        self._published = ""
        """Digest that the folder must have; empty once it was compared, or where none is known."""
        self._loaded = False
        """Whether weights were loaded since the last canary that serves as the reference."""

    def begin(self, folder: Path, weights: WeightsRef | None) -> None:
        """An engine was started from ``folder``: everything is resident."""
        self.tags = set(RESIDENT_TAGS)
        self.note = None
        self._hold(folder, weights)

    def forget(self) -> None:
        """The engine is gone."""
        self.tags.clear()
        self.version = self.digest = self.note = self._folder = None
        self._loaded = self._unknown = False

    def current(self, weights: WeightsRef | None) -> bool:
        if self._unknown:
            return False
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
        self,
        control: EngineControl,
        weights: WeightsRef,
        token: FenceToken,
        spec: EngineGroupSpec,
        place: Place,
    ) -> None:
        """By the transport of the group; from disk, all of it, where that does not come to a good
        end. Until one did the weights are unknown, and :meth:`check_weights` refuses them.

        Raises:
            PermanentError, UnconfirmedError: nor did the disk; the engine must not be opened.
        """
        folder = weights_folder(weights)
        self._doubt()
        if spec.weights.transport != "disk":
            change = WeightChange(control, token, spec.weights.timeout)
            try:
                if spec.weights.transport == "tensor":
                    if spec.nodes_per_replica > 1:
                        raise PermanentError("some of its ranks are on other hosts")
                    ranks = spec.gpus_per_replica
                    await change.from_tensors(folder, weights, spec.weights, ranks)
                else:
                    await change.from_group(place, weights)
                self._hold(folder, weights.model_copy(update={"digest": ""}))  # compared as sent
                await self.check_weights(control, spec)
            except OtherWeights:
                self._doubt()
                await change.abandon()
                raise
            except (RelaxError, OSError, RuntimeError, ImportError) as error:
                self._doubt()
                self.note = f"{spec.weights.transport}: {error}"
                log.warning("weights %d come from disk: %s", weights.version, self.note)
                await change.abandon()
            else:
                return
        await control.load(folder, weights.version, token, spec.launch_timeout)
        self._hold(folder, weights)

    def _hold(self, folder: Path, weights: WeightsRef | None) -> None:
        self._folder, self._loaded, self._unknown = folder, True, False
        self.digest = None
        self.version = None if weights is None else weights.version
        self._published = "" if weights is None else weights.digest

    def _doubt(self) -> None:
        self.version = self.digest = self.note = None
        self._unknown = True

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
        """Read version and digest back and compare them with what they must be, and what was read
        from the disk with what the trainer published. The digest must also be the one that was read
        before; on a GPU, or with several ranks, nothing else says whether they are whole.

        Raises:
            PermanentError: they are not.
            UnconfirmedError: they could not be read.
        """
        if self._unknown:
            raise PermanentError(
                f"The weights of engine {self._engine_id} are unknown: a load has not ended well."
            )
        version = await control.weight_version()
        if version != self.version:
            raise PermanentError(
                f"Engine {self._engine_id} says weight version {version}; {self.version} was"
                f" loaded from {self._folder}."
            )
        if self._published and spec.weights.verify:
            assert self._folder is not None
            await asyncio.to_thread(_check_published, self._folder, self._published)
        self._published = ""
        digest = await control.weights_digest(spec.launch_timeout)
        expected = await asyncio.to_thread(self._expected_digest, spec)
        if expected is not None and digest != expected:
            raise PermanentError(
                f"Engine {self._engine_id} holds weights of digest {digest} as version {version};"
                f" the files in {self._folder} make {expected}.",
                cure="The load was not what it seemed: do not sample from this engine.",
            )
        if self.digest not in (None, digest):
            raise PermanentError(
                f"Engine {self._engine_id} holds weights of digest {digest} as version {version};"
                f" it held {self.digest}, and nothing was loaded since.",
                cure="They were damaged while it slept or ran: it is rebuilt, not sampled from.",
            )
        self.digest = digest

    def _expected_digest(self, spec: EngineGroupSpec) -> str | None:
        folder = self._folder
        if spec.device != "cpu" or spec.gpus_per_replica != 1 or folder is None:
            return None
        dtype = spec.server_args.get("dtype") or checkpoint_dtype(Path(spec.model_path))
        return expected_digest(folder, str(dtype))


def _check_published(folder: Path, digest: str) -> None:
    sent = SentDigest()
    sent.add(host_tensors(folder))
    sent.check(digest, folder)


def weights_folder(weights: WeightsRef) -> Path:
    folder = local_path(weights.uri)
    if folder is None:
        raise PermanentError(
            f"Weights version {weights.version} are at {weights.uri}, which is no folder of this"
            " host.",
            cure="Engines load from a folder: set staging.url to a path that every host mounts.",
        )
    return folder
