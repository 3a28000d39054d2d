"""What may go wrong between an engine's actor and its server, done inside the real actor.

A test asks for a fault by a file ``<role>.<fault>`` in the folder that RELAX_TEST_FAULTS names. The
actor that meets it takes the file away (so each happens once) and leaves ``<role>.<fault>.met``,
with the Unix seconds at which it did. :mod:`tests.chaos.hook.sitecustomize` brings this into its
process.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

RELEASE, RESUME, CLOSE = (
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/_fence/close",
)
LATE_SECONDS = 25.0
"""By which the late answer is later than its asker waits."""
KEPT = 60 << 30
"""Bytes that the device's probe says are in use, in the place of a real device's."""

Call = Callable[..., Awaitable[Any]]
Meet = Callable[[str], bool]


def folder() -> Path:
    return Path(os.environ["RELAX_TEST_FAULTS"])


def ask_for(role: str, fault: str) -> None:
    """Of the test: the next actor of the role that comes to the place meets the fault."""
    (folder() / f"{role}.{fault}").touch()


def met_at(role: str, fault: str) -> float | None:
    """When an actor met it; None: not yet."""
    try:
        return float((folder() / f"{role}.{fault}.met").read_text())
    except (FileNotFoundError, ValueError):
        return None


def harm(control: Any) -> None:
    """Called in each process once its module of the engine's control is there."""
    real = control.EngineControl._call
    unconfirmed = control.UnconfirmedError

    async def call(self: Any, method: str, path: str, *given: Any, **more: Any) -> Any:
        async def go_on(**other: Any) -> Any:
            return await real(self, method, path, *given, **more | other)

        if path == RELEASE and _meets("lost-answer"):
            await go_on()
            raise unconfirmed("the connection was cut after the engine had done it")
        if path == RELEASE and _meets("late-answer"):
            answer = await go_on()
            await asyncio.sleep(_patience() + LATE_SECONDS)
            return answer
        if path == RELEASE and _meets("refusal"):
            return 409, {"error": "not now"}
        if path == RESUME and _meets("kept-memory"):
            _keep_memory()
        if path == RESUME and _meets("death-on-onload"):
            _scheduler().send_signal(signal.SIGKILL)
            return await go_on(timeout=5.0)
        if path == CLOSE and _meets("wedge"):
            _scheduler().send_signal(signal.SIGSTOP)
        return await go_on()

    control.EngineControl._call = call


def _meets(fault: str) -> bool:
    role = _role()
    if role is None:
        return False
    asked = folder() / f"{role}.{fault}"
    try:
        asked.unlink()
    except FileNotFoundError:
        return False
    (folder() / f"{asked.name}.met").write_text(str(time.time()))
    return True


def _role() -> str | None:
    """Of the engine whose actor this process is, for instance ``rollout``."""
    import ray

    if not ray.is_initialized():
        return None
    name = ray.get_runtime_context().get_actor_name() or ""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[0] if kind == "engine" else None


def _patience() -> float:
    return float(os.environ["RELAX_TEST_PATIENCE"])


def _scheduler() -> psutil.Process:
    """Of the engine that this actor has started."""
    for process in psutil.Process().children(recursive=True):
        if "schedul" in " ".join(process.cmdline()) or "schedul" in process.name():
            return process
    raise AssertionError("the actor has no engine with a scheduler")


def _keep_memory() -> None:
    """A probe of the device that says what a CPU cannot: nothing came back while the engine lives.
    (The one double here.)"""
    from relax_infer.engines import node

    real = node.EngineNode.memory
    living = _scheduler()

    async def memory(self: Any) -> Any:
        use = await real(self)
        if not living.is_running() or living.status() == psutil.STATUS_ZOMBIE:
            self.files.remove_owed()
            return use.model_copy(update={"at_launch": None, "in_use": 0, "owing": None})
        return use.model_copy(update={"at_launch": 1 << 30, "in_use": KEPT})

    node.EngineNode.memory = memory
