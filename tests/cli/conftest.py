"""A Temporal server and workers in a thread of their own, since each command runs its own loop."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker
from typer.testing import CliRunner, Result

from relax_infer.cli import app
from relax_infer.contracts.policies import QUEUES
from tests.workflows.scripted_world import ScriptedWorld
from workers._converter import data_converter
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._temporal import DYNAMIC
from workflows import WORKFLOWS
from workflows._visible import REWARD, ROLE, RUN, STATE, STEP, WEIGHT_VERSION

TEMPORAL = str(Path(sys.executable).parent / "temporal")
T = TypeVar("T")
Command = Callable[..., Result]


class Temporal:
    """The server, as a thread that does not run its loop may use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        self._loop, self._client = loop, client

    @property
    def address(self) -> str:
        return self._client.service_client.config.target_host

    def do(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """What a piece of asynchronous work returns."""
        return asyncio.run_coroutine_threadsafe(work(self._client), self._loop).result(60)

    @contextmanager
    def working(self, world: ScriptedWorld) -> Iterator[None]:
        """Workers over the scripted world on all queues."""
        workers = AsyncExitStack()

        async def begin(client: Client) -> None:
            for queue in QUEUES:
                worker = Worker(
                    client,
                    task_queue=queue,
                    workflows=WORKFLOWS if queue == "relax" else [],
                    activities=world.activities(),
                    workflow_runner=workflow_runner(),
                    workflow_failure_exception_types=FAILS_WORKFLOW,
                    sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
                )
                await workers.enter_async_context(worker)

        async def end(_: Client) -> None:
            await workers.aclose()

        self.do(begin)
        try:
            yield
        finally:
            self.do(end)


@pytest.fixture(scope="session")
def temporal() -> Iterator[Temporal]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    environment = asyncio.run_coroutine_threadsafe(
        WorkflowEnvironment.start_local(
            dev_server_existing_path=TEMPORAL,
            data_converter=data_converter(),
            search_attributes=[RUN, STEP, ROLE, STATE, WEIGHT_VERSION, REWARD],
            dev_server_extra_args=list(DYNAMIC),
        ),
        loop,
    ).result(60)
    yield Temporal(loop, environment.client)
    asyncio.run_coroutine_threadsafe(environment.shutdown(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a failed test left running must not ask the next test's world for anything."""
    yield
    if "temporal" in request.fixturenames:
        request.getfixturevalue("temporal").do(_end_all)


async def _end_all(client: Client) -> None:
    async for left in client.list_workflows("ExecutionStatus = 'Running'"):
        with suppress(RPCError):  # it has just ended by itself
            await client.get_workflow_handle(left.id).terminate("its test is over")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def command(home: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``command("status", "run-1")``, without any server in the environment."""
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "RAY_ADDRESS", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(home / "no-temporal.toml"))
    monkeypatch.setenv("RELAX_HOME", str(home))
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.fixture
def remote(command: Command, temporal: Temporal, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command of somebody whose TEMPORAL_ADDRESS leads to the server."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
    return command


@pytest.fixture
def run_id() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


class Watching:
    """A command in a process of its own, to look at while it runs."""

    def __init__(self, *words: str, package: str | None = None) -> None:
        self._words, self._package = words, package

    def __enter__(self) -> "Watching":
        start = "import relax_infer; from relax_infer.cli import main; "
        if self._package is not None:
            start += f"relax_infer.__file__ = {self._package!r}; "
        start += "main()"
        self._process = subprocess.Popen(
            (sys.executable, "-c", start, *self._words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def next_line(self, containing: str) -> str:
        """The next line of its output with that text."""
        assert self._process.stdout is not None
        seen: list[str] = []
        for line in self._process.stdout:
            seen.append(line)
            if containing in line:
                return line
        raise AssertionError(f"it ended without {containing!r}: {seen}")

    def end(self) -> tuple[int, str]:
        """Exit code and the rest of the output, once it has ended."""
        output, _ = self._process.communicate(timeout=60)
        return self._process.returncode, output


def record_of(home: Path, address: str, **changes: object) -> dict[str, object]:
    """What ``up`` writes, of a stack whose Temporal is at ``address``."""
    document: dict[str, object] = {
        "stack": "0b0c",
        "home": str(home),
        "temporal_address": address,
        "temporal_ui": "http://127.0.0.1:8233",
        "temporal_namespace": "default",
        "ray_address": "127.0.0.1:6379",
        "processes": {},
    }
    return document | changes


def stack_record(home: Path, address: str, **changes: object) -> None:
    """Write that file."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "stack.json").write_text(json.dumps(record_of(home, address, **changes)))


def eventually(look: Callable[[], T], seconds: float = 120.0) -> T:
    """What ``look`` returns once that is true; the bound is for a machine that does much else."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := look():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not reached within {seconds} s")
