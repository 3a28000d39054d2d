"""What the detached Ray actor ``front`` does: keep a router and a gateway running on one host.

The children outlive an actor that crashes; only when Ray itself ends an actor does it end the
actor's children. What the next actor must know of them (processes, ports, the router's workers) is
in a file of the host, so that it adopts living children and starts dead ones on their ports.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field

from relax_infer.contracts.base import Message
from relax_infer.contracts.batch import Judging, RegistryPush
from relax_infer.contracts.failures import PermanentError, RelaxError, TransientError
from relax_infer.contracts.run import FrontAddress
from relax_infer.engines.host_processes import ProcessStamp
from relax_infer.engines.router import RouterAdapter, router_command
from relax_infer.gateway._child import Child
from relax_infer.gateway._front_host import (
    arguments_of,
    child_environment,
    fingerprint,
    port_of,
    private_folder,
    up,
)
from relax_infer.gateway.tls import tls_of
from relax_infer.telemetry import configure_actor

log = logging.getLogger(__name__)

_UP_TIMEOUT = 60.0
"""Seconds from a child's start to its first answer."""
_SILENT_TIMEOUT = 30.0
"""Seconds for which a running child may be silent before it is started again."""
_BETWEEN_LOOKS, _AFTER_A_FAILURE = 1.0, 10.0
_LOOKS_PER_SWEEP = 10
_CALL_TIMEOUT = aiohttp.ClientTimeout(total=10)


class FrontState(Message):
    """What outlives the actor."""

    surroundings: str
    """Fingerprint of what the children were told of stack and Temporal."""
    router_port: int = 0
    prometheus_port: int = 0
    gateway_port: int = 0
    router: ProcessStamp | None = None
    gateway: ProcessStamp | None = None
    router_workers: tuple[str, ...] = ()
    """Addresses that the router was last told to hold."""
    router_others: tuple[str, ...] = ()
    """The same, of engines of others."""
    judging: Judging = Judging()
    """What the gateway was last told."""
    newest: dict[str, tuple[int, int]] = Field(default_factory=dict[str, tuple[int, int]])
    """Role and the (term, revision) of its newest push: a gateway that was started again has none,
    and an older push must not win for that."""


def key_of(cluster: str, run: str) -> str:
    """In the names of a front's files."""
    return hashlib.sha256(f"{cluster}/{run}".encode()).hexdigest()[:16]


def state_file(cluster: str, run: str) -> Path:
    """Of the front of a run, on its own host."""
    return private_folder() / f"front-{key_of(cluster, run)}.json"


class FrontActor:
    """Async Ray actor; one per run."""

    def __init__(self, run: str, cluster: str, host: str, environment: Mapping[str, str]) -> None:
        """
        Args:
            run: run id.
            cluster: names the Ray cluster, so that equal run ids of two clusters do not meet.
            host: address to listen on.
            environment: variables that the children get on top of this process's own.
        """
        self._run, self._host = run, host
        home = environment.get("RELAX_HOME")
        logs = Path(home) / "logs" if home else private_folder() / "logs"
        key = key_of(cluster, run)
        configure_actor(f"../{run}.gateway", run, role="gateway")
        self._socket = private_folder() / f"gw-{key}.sock"
        self._file = state_file(cluster, run)
        self._environment = child_environment(environment)
        self._scheme = "http" if tls_of(self._environment) is None else "https"
        self._surroundings = fingerprint(environment)
        self._router = Child("sglang-router", logs / f"{run}.router.log")
        self._gateway = Child("gateway", logs / f"{run}.gateway.log")
        self._ensuring = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._pushing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._router_fault: str | None = None
        self._outdated: set[str] = set()
        """Adopted children that were told of another stack or Temporal."""
        self._state = self._recall()

    async def ensure(self) -> FrontAddress:
        """Both children answer; dead ones are started again on their ports, and from then on
        also when they die while nobody asks.

        A router that had to be started again is given its workers back as far as they answer; what
        did not work is in :meth:`describe`, and the next push decides anew.
        """
        async with self._ensuring:
            restarted, *others = await asyncio.gather(
                self._ensure_router(), self._ensure_gateway(), return_exceptions=True
            )
            for outcome in (restarted, *others):
                if isinstance(outcome, BaseException):
                    raise outcome
            if restarted and self._state.router_workers:
                await self._give_workers_back()
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())
        return self._address

    async def push(self, push: RegistryPush) -> dict[str, Any]:
        """The router's workers first, then the gateway's document; an older push changes neither.

        Returns:
            ``{"outcome": "accepted" | "unchanged" | "older", "held": {...}}``.
        """
        await self.ensure()
        async with self._pushing[push.role]:
            order = _order(push)
            held = await self._newest(push.role)
            if held is not None and order < (held["term"], held["topology_revision"]):
                log.warning(
                    "%s (term, revision) %s is refused: older, held %s", *(push.role, order, held)
                )
                return {"outcome": "older", "held": held}
            self._remember(newest={**self._state.newest, push.role: order})
            await self._route(push)
            if push.judging is not None and push.judging != self._state.judging:
                await self._tell(push.judging)
            body = {"term": push.term, "document": push.document}
            status, answer = await self._control("PUT", f"/registry/{push.role}", body)
        if status == 200 or answer.get("outcome") == "older":
            return answer
        raise PermanentError(
            f"the gateway of run {self._run} refused the registry of {push.role}:"
            f" {status} {answer.get('detail')}"
        )

    async def _newest(self, role: str) -> dict[str, Any] | None:
        """What the gateway holds of a role, or what was pushed before it was started again."""
        held = (await self._control("GET", "/registry"))[1].get(role)
        pushed = self._state.newest.get(role)
        if held is not None:
            held.pop("document")
            if pushed is None or pushed <= (held["term"], held["topology_revision"]):
                return held
        return None if pushed is None else {"term": pushed[0], "topology_revision": pushed[1]}

    async def _route(self, push: RegistryPush) -> None:
        workers, others = push.router_workers, push.router_others
        if workers is None and others is None:
            return
        named = {"router_workers": workers, "router_others": others}
        self._remember(**{name: urls for name, urls in named.items() if urls is not None})
        router, state = RouterAdapter(self._address.router_url), self._state
        if workers is None:  # ours are as they were, and some may sleep
            await router.keep_only((*state.router_workers, *state.router_others))
        else:
            await router.set_workers(workers, state.router_others)
        self._router_fault = None

    async def _tell(self, judging: Judging) -> None:
        status, answer = await self._control("PUT", "/judging", judging.model_dump(mode="json"))
        if status != 200:  # one of an earlier version; started again, it gets it as arguments
            log.warning(
                "the gateway of run %s goes on judging messages as before: %d %s",
                *(self._run, status, answer.get("detail")),
            )
        self._remember(judging=judging)

    async def describe(self) -> dict[str, Any]:
        """Processes, ports, files; for status, tests and the sweep of a local stack."""
        state = self._state
        return {
            "run": self._run,
            "actor_pid": os.getpid(),
            "router_url": self._address.router_url,
            "gateway_url": self._address.gateway_url,
            "router_pid": self._router.stamp.pid if self._router.stamp else None,
            "router_alive": self._router.alive,
            "gateway_pid": self._gateway.stamp.pid if self._gateway.stamp else None,
            "gateway_alive": self._gateway.alive,
            "router_port": state.router_port,
            "prometheus_port": state.prometheus_port,
            "gateway_port": state.gateway_port,
            "control_socket": str(self._socket),
            "state_file": str(self._file),
            "logs": [str(self._router.log), str(self._gateway.log)],
            "router_workers": list(state.router_workers),
            "router_fault": self._router_fault,
        }

    async def stop(self) -> None:
        """Both children are gone, and so are the socket and the file."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        async with self._ensuring:
            self._keeper = None
            await asyncio.gather(self._router.stop(), self._gateway.stop())
            self._socket.unlink(missing_ok=True)
            self._file.unlink(missing_ok=True)

    # --- the children

    @property
    def _address(self) -> FrontAddress:
        return FrontAddress(
            router_url=f"http://{self._host}:{self._state.router_port}",
            gateway_url=f"{self._scheme}://{self._host}:{self._state.gateway_port}",
        )

    async def _keep(self) -> None:
        """Start again what died since the last look: callers need it between two pushes, too. Now
        and then look for workers that the router should not have."""
        for look in itertools.count(1):
            await asyncio.sleep(_BETWEEN_LOOKS)
            try:
                if not (self._router.alive and self._gateway.alive):
                    await self.ensure()
                elif look % _LOOKS_PER_SWEEP == 0:
                    await self._drop_strays()
            except Exception as error:
                # Whoever asks next gets the error; what starts only to die must not spin.
                log.warning("front of run %s: %s", self._run, error)
                await asyncio.sleep(_AFTER_A_FAILURE)

    async def _drop_strays(self) -> None:
        """Not while a push sets the router's workers."""
        pushing = self._pushing["rollout"]
        if pushing.locked():
            return
        async with pushing:
            strays = await RouterAdapter(self._address.router_url).drop_strays(
                (*self._state.router_workers, *self._state.router_others)
            )
        if strays:
            log.warning("router of run %s let go of %s", self._run, ", ".join(sorted(strays)))

    async def _ensure_router(self) -> bool:
        """Whether it had to be started."""
        if await self._well(self._router, self._address.router_url, "/health"):
            return False
        port = await port_of(self._host, self._state.router_port)
        metrics = await port_of(self._host, self._state.prometheus_port)
        self._router.start(router_command(port, metrics, host=self._host), self._environment)
        self._remember(router_port=port, prometheus_port=metrics, router=self._router.stamp)
        await up(self._router, self._address.router_url, "/health", _UP_TIMEOUT)
        return True

    async def _ensure_gateway(self) -> bool:
        """Whether it had to be started."""
        if await self._well(self._gateway, self._address.gateway_url, "/healthz"):
            return False
        port = await port_of(self._host, self._state.gateway_port)
        command = [
            *(sys.executable, "-m", "workers.gateway", "--run", self._run),
            *("--host", self._host, "--port", str(port), "--control-socket", str(self._socket)),
            *arguments_of(self._state.judging),
        ]
        self._gateway.start(command, self._environment)
        self._remember(gateway_port=port, gateway=self._gateway.stamp)
        await up(self._gateway, self._address.gateway_url, "/healthz", _UP_TIMEOUT)
        return True

    async def _well(self, child: Child, url: str, path: str) -> bool:
        """Whether it may stay; else it is gone now. One that is slow has requests under way."""
        if child.alive and child.name not in self._outdated:
            try:
                await up(child, url, path, _SILENT_TIMEOUT)
                return True
            except TransientError as error:
                log.warning("%s is started again: %s", child.name, error.message)
        await child.stop()
        self._outdated.discard(child.name)
        return False

    async def _give_workers_back(self) -> None:
        workers, others = self._state.router_workers, self._state.router_others
        try:
            router = RouterAdapter(self._address.router_url, timeout=15.0)
            await router.set_workers(workers, others)
            self._router_fault = None
        except RelaxError as error:
            # The engines decide whether this can work, and the next push names the true ones.
            self._router_fault = str(error)
            log.warning("router of run %s, restarted: %s", self._run, error)

    async def _control(
        self, method: str, path: str, body: object | None = None
    ) -> tuple[int, dict[str, Any]]:
        connector = aiohttp.UnixConnector(path=str(self._socket))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=_CALL_TIMEOUT) as session,
                session.request(method, f"http://gateway{path}", json=body) as answer,
            ):
                return answer.status, await answer.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TransientError(
                f"the gateway of run {self._run} did not answer {method} {path} on"
                f" {self._socket}: {type(error).__name__} {error}"
            ) from error

    # --- what outlives the actor

    def _recall(self) -> FrontState:
        state = FrontState(surroundings=self._surroundings)
        with contextlib.suppress(FileNotFoundError):
            state = FrontState.model_validate_json(self._file.read_text())
        self._router.adopt(state.router)
        self._gateway.adopt(state.gateway)
        if state.surroundings != self._surroundings:
            self._outdated = {self._router.name, self._gateway.name}
            # Who pushed then is gone; a run of another stack may have the same name.
            state = state.model_copy(update={"newest": {}})
        return state

    def _remember(self, **changes: object) -> None:
        changes["surroundings"] = self._surroundings
        self._state = self._state.model_copy(update=changes)
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(self._state.model_dump(mode="json")))
        draft.replace(self._file)


def _order(push: RegistryPush) -> tuple[int, int]:
    revision = push.document.get("topology_revision")
    if not isinstance(revision, int):
        raise PermanentError(f"the registry of {push.role} has no topology_revision")
    return push.term, revision
