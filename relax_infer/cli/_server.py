"""Which Temporal server a command talks to."""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

import typer
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig, ClientConnectConfig
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError

from relax_infer.cli._errors import CommandError
from relax_infer.cli._home import last_address, read_stack, stored_runs
from relax_infer.security.codec import sealed

_CONNECT_TIMEOUT = 10.0
_LOOK_SECONDS = 1.0
_INNERMOST = re.compile(r'(?:message|error): "([^"]+)"')
_NAMED = 5
"""Runs that are named before the rest is counted."""


@dataclass(frozen=True)
class Target:
    """A server's address, before anything is connected."""

    address: str
    namespace: str
    ui: str | None
    """Base URL of the web UI, where it is known."""
    home: Path | None
    """Home of the local stack that it belongs to; None for any other server."""
    config: ClientConnectConfig

    def page_of(self, run: str) -> str | None:
        """Web UI page of a run."""
        if self.ui is None:
            return None
        return f"{self._workflows}/{quote(run)}"

    def views_of(self, run: str) -> dict[str, str]:
        """Lists of the web UI that a person saves as views of a run, by what they show; none where
        the web UI is not known."""
        if self.ui is None:
            return {}
        mine = f"RelaxRun = '{run}'"
        queries = {
            "all": mine,
            "steps": f"{mine} AND WorkflowType = 'TrainingStep'",
            "open": f"{mine} AND ExecutionStatus = 'Running'",
            "waits": f"{mine} AND RelaxState = 'BLOCKED' AND ExecutionStatus = 'Running'",
        }
        return {name: f"{self._workflows}?query={quote(q)}" for name, q in queries.items()}

    @property
    def _workflows(self) -> str:
        assert self.ui is not None
        return f"{self.ui.rstrip('/')}/namespaces/{self.namespace}/workflows"


@dataclass(frozen=True)
class Server:
    """A connected client and where it leads."""

    client: Client
    target: Target


def find_target(home: Path) -> Target | None:
    """The local stack of ``home`` if one was started there, else the standard Temporal environment
    configuration (TEMPORAL_ADDRESS, or a profile of its file); None where neither says anything, or
    it names the stack that was here and nobody listens there.
    """
    stack = read_stack(home)
    if stack is not None:
        asked = os.environ.get("TEMPORAL_ADDRESS")
        if asked and asked != stack.temporal_address:
            _note_other(home, asked)
        return Target(
            address=stack.temporal_address,
            namespace=stack.temporal_namespace,
            ui=stack.temporal_ui,
            home=stack.home,
            config={
                "target_host": stack.temporal_address,
                "namespace": stack.temporal_namespace,
            },
        )
    try:
        config = ClientConfig.load_client_connect_config()
    except (ValueError, RuntimeError) as error:
        raise CommandError(
            f"The Temporal environment configuration cannot be used: {error}.",
            cure="Check TEMPORAL_ADDRESS, TEMPORAL_PROFILE and the file that they name.",
        ) from error
    if "target_host" not in config:
        return None
    address, namespace = str(config["target_host"]), config.get("namespace", "default")
    if address == last_address(home) and not _listens(address):
        return None  # what `relax-infer env` exported before the local stack went down
    return Target(address, str(namespace), ui=None, home=None, config=config)


@asynccontextmanager
async def connected(home: Path) -> AsyncIterator[Server]:
    """A client of the server that ``home`` or the environment names.

    Raises:
        CommandError: no server is known, it does not answer, or refuses what is asked inside.
    """
    target = find_target(home)
    if target is None:
        raise _nobody_known(home)
    _quiet()
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            converter = sealed(pydantic_data_converter)
            client = await Client.connect(**target.config, data_converter=converter)
    except (RuntimeError, TimeoutError) as error:
        raise _unreachable(target, error) from error
    try:
        yield Server(client, target)
    except RPCError as error:
        raise CommandError(
            f"Temporal at {target.address} says: {error.message} ({error.status.name})."
        ) from error


@cache
def _quiet() -> None:
    """Temporal's client logs each try that fails; a command says itself what does not answer."""
    only_errors = TelemetryFilter(core_level="ERROR", other_level="ERROR")
    logs = LoggingConfig(filter=only_errors)
    with suppress(RuntimeError):  # this process has a runtime already
        Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=logs)))


def _nobody_known(home: Path) -> CommandError:
    if runs := stored_runs(home):
        more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
        return CommandError(
            f"The local stack in {home} is down; its store has {', '.join(runs[:_NAMED])}{more}.",
            cure="`relax-infer up` starts it again: what had not ended goes on. Reports need no"
            " stack: `relax-infer report RUN`.",
        )
    return CommandError(
        f"No local stack in {home}, and TEMPORAL_ADDRESS is not set.",
        cure="Start a stack with `relax-infer up`, name its home with --home, or set"
        " TEMPORAL_ADDRESS.",
    )


def _listens(address: str) -> bool:
    """Of this machine."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_LOOK_SECONDS):
            return True
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """The innermost words of an error of Temporal's client, which nests several."""
    if isinstance(error, TimeoutError):
        return f"not within {_CONNECT_TIMEOUT:.0f} s"
    words = _INNERMOST.findall(str(error))
    return words[-1] if words else " ".join(str(error).split()) or type(error).__name__


@cache
def _note_other(home: Path, asked: str) -> None:
    typer.echo(
        f"The local stack in {home} is used, not TEMPORAL_ADDRESS={asked}:"
        " end it with `relax-infer down` to use the other.",
        err=True,
    )


def _unreachable(target: Target, error: Exception) -> CommandError:
    if target.home is not None:
        return CommandError(
            f"Temporal of the local stack in {target.home} does not answer at {target.address}.",
            cure="`relax-infer up` starts what has ended; the runs go on where they were.",
        )
    return CommandError(
        f"Temporal does not answer at {target.address}: {_reason(error)}.",
        cure="Check TEMPORAL_ADDRESS and the network, or start a stack with `relax-infer up`.",
    )
