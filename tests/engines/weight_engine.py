"""A double of SGLang's ways of new weights, behind a real fence on real sockets.

It keeps SGLang's rules (a change has a begin and an end, a group is joined before it is used, only
what was loaded is hashed); ``change_rules`` holds the real engine to the same ones in
``test_real_weights.py``. The tensors are real: opened from shared memory, or taken from a
:class:`Wire` that stands for the network of a process group.
"""

import asyncio
import base64
import contextlib
import json
import pickle
import queue
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.weights import Seat, SeatAsk
from relax_infer.engines.control import EngineControl
from relax_infer.engines.digest import expected_digest
from relax_infer.engines.host_tensors import Bucket, host_tensors
from tests.engines.checkpoints import CONFIG
from tests.engines.fake_engine import FakeEngine

PATIENCE = 5.0
"""Seconds that ranks of the double wait for each other."""


class Wire:
    """What rank 0 sends reaches every engine that has joined."""

    def __init__(self) -> None:
        self.engines: dict[str, list[queue.Queue[bytes | None]]] = defaultdict(list)
        self.groups: list[FakeGroup] = []

    def group(self, ask: SeatAsk, world: int) -> "FakeGroup":
        made = FakeGroup(self, f"group-{len(self.groups)}", world)
        self.groups.append(made)
        return made


class FakeGroup:
    """Rank 0 of a group over a wire; ``dies_at`` is the bucket before which it ends."""

    dies_at: int | None = None
    port = 1

    def __init__(self, wire: Wire, name: str, world: int) -> None:
        self.wire, self.name, self.world = wire, name, world
        self.sent, self.aborted, self.closed = 0, "", False

    def join(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(self.wire.engines[self.name]) < self.world - 1:
            if self.aborted or time.monotonic() > deadline:
                raise RuntimeError(self.aborted or "a rank did not come")
            time.sleep(0.005)

    def send(self, bucket: Bucket) -> None:
        if self.aborted:
            raise RuntimeError(self.aborted)
        if self.sent == self.dies_at:
            raise RuntimeError("rank 0 was killed")
        for engine in self.wire.engines[self.name]:
            engine.put(b"".join(bytes(tensor.data) for tensor in bucket))
        self.sent += 1

    def abort(self, why: str) -> None:
        self.aborted = why

    def close(self) -> None:
        self.closed = True
        for engine in self.wire.engines[self.name]:
            engine.put(None)


class WeightEngine(FakeEngine):
    """``faults[path]`` is a list for its next calls: ``refuse``, ``lose_reply``, ``spoil`` (a byte
    of what is loaded) or ``silence`` (no call is answered from then on); empty: none."""

    def __init__(self, folder: Path, wire: Wire | None = None) -> None:
        super().__init__()
        self.wire = wire or Wire()
        self.label = "0"
        self.labels: list[str] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.calls: list[str] = []
        self._open, self._silent = False, False
        self._groups: dict[str, queue.Queue[bytes | None]] = {}
        self._read(folder)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        body = json.loads((await receive())["body"] or b"{}") if scope["method"] == "POST" else {}
        self.calls.append(path)
        fault = self.faults[path].pop(0) if self.faults[path] else ""
        self._silent = self._silent or fault == "silence"
        if self._silent:
            await asyncio.Event().wait()
        status, answer = 400, {"success": False, "message": "refused"}
        if fault != "refuse":
            status, answer = await self._do(path, body)
        if fault == "spoil":
            name = sorted(self.tensors)[0]
            self.tensors[name] = self.tensors[name] + 1
        if fault == "lose_reply":  # the connection breaks off
            headers = [(b"content-type", b"application/json"), (b"content-length", b"99")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        else:
            await self._reply(send, status, answer)

    async def _do(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        group = body.get("group_name")
        match path:
            case "/begin_weight_update" if not self._open:
                self._open = True
            case "/end_weight_update" if self._open:
                self._open = False
            case "/update_weights_from_tensor" if self._open:
                for text in body["serialized_named_tensors"]:
                    for name, tensor in pickle.loads(base64.b64decode(text)):
                        self.tensors[name] = tensor.numpy().copy()
            case "/init_weights_update_group":
                self._groups[group] = queue.Queue()
                self.wire.engines[group].append(self._groups[group])
            case "/destroy_weights_update_group" if group in self._groups:
                del self._groups[group]
            case "/update_weights_from_distributed" if self._open and group in self._groups:
                sent = await asyncio.to_thread(self._next, group)
                if sent is None:
                    return 400, {"message": "connection closed by peer"}
                self._take(body, sent)
            case "/update_weights_from_disk":
                self._read(Path(body["model_path"]))
                self._name(body["weight_version"])
            case "/update_weight_version":
                self._name(body["new_version"])
            case "/model_info":
                return 200, {"weight_version": self.label}
            case "/weights_checker":
                return 200, {"ranks": [{"per_gpu_checksum": self.digest()}]}
            case "/flush_cache":
                pass
            case _:
                return 400, {"success": False, "message": f"{path} is out of turn"}
        return 200, {"success": True}

    def digest(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            save_file(self.tensors, Path(folder) / "model.safetensors")
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
            digest = expected_digest(Path(folder), "float32")
        assert digest is not None
        return digest

    def _next(self, group: str) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._groups[group].get(timeout=PATIENCE)
        return None

    def _name(self, label: str) -> None:
        self.label = label
        self.labels.append(label)

    def _read(self, folder: Path) -> None:
        for tensor in host_tensors(folder):
            array = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
            self.tensors[tensor.name] = array.copy()

    def _take(self, body: dict[str, Any], sent: bytes) -> None:
        start = 0
        for name, shape in zip(body["names"], body["shapes"], strict=True):
            stop = start + 4 * int(np.prod(shape))
            self.tensors[name] = np.frombuffer(sent[start:stop], np.float32).reshape(shape).copy()
            start = stop


async def change_rules(control: EngineControl, token: FenceToken) -> None:
    """What an engine refuses; nothing of it is changed."""
    seat = Seat(host="127.0.0.1", port=1, group="none", world=2, rank_offset=1, buckets=())
    for out_of_turn in (
        control.update_from_tensors([], token, 10),
        control.update_from_group(seat, (), token, 10),
        control.end_update(token, 10),
        control.leave_group(seat, token, 10),
    ):
        with pytest.raises(PermanentError):
            await out_of_turn
    await control.begin_update(token, 10)
    with pytest.raises(PermanentError):
        await control.begin_update(token, 10)
    await control.end_update(token, 10)
