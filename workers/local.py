"""The local stack: a Temporal server, a Ray head and a worker on this machine.

::

    python -m workers.local up   --home DIR [--gpus N | --at-least N] [--memory-gib N]
                                 [--no-worker] [--temporal-port P] [--ui-port P] [--ray-port P]
    python -m workers.local down --home DIR

Progress goes to stdout, a line each; errors to stderr. Exit codes: 0 done (also when ``up`` finds
the stack running, or ``down`` finds none), 1 ``down`` could not end everything, 2 it cannot be
done as asked and nothing of the attempt is left, 130 interrupted and nothing is left.

``<home>/stack.json`` is there from the first process to the end of ``down``. Its keys::

    stack               uuid; RELAX_STACK in the environment of every process of the stack
    home                absolute path
    boot                boot id of the machine; after another boot none of the processes is ours
    temporal_address    host:port
    temporal_ui         URL
    temporal_metrics    URL
    worker_metrics      URL: how runs, leases and replicas stand (docs/metrics.md)
    worker_sdk_metrics  URL: the Temporal SDK's own
    temporal_namespace  "default"
    ray_address         host:port
    ray_folder          Ray's sockets and logs while it runs
    ray_token_file      what a driver needs to join Ray (RAY_AUTH_TOKEN_PATH, RAY_AUTH_MODE=token)
    gpus                GPUs of the Ray head; pretended where the machine has none
    worker              whether a worker belongs to the stack
    ready               whether ``up`` has finished
    processes           {"temporal" | "ray" | "worker": {"pid", "started", "log"}};
                        ``started`` in clock ticks since boot, as /proc/<pid>/stat has it

The home also holds ``temporal.db`` (workflows outlive ``down``), ``store/``, ``models/`` and
``logs/``. Router, gateway and engines are started by actors of a run; they inherit the marker
through Ray, and ``down`` ends them too.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from workers import _stack_file
from workers._preflight import Ports, StackError, binary, check_memory
from workers._stack import DownReport, Say, Stack
from workers._stack_file import StackRecord

__all__ = ["DownReport", "Stack", "StackError", "down", "up"]

_GPUS = 2
"""Pretended ones, where nobody says how many."""


def up(
    home: Path,
    *,
    gpus: int | None = None,
    at_least: int = 0,
    worker: bool = True,
    memory_gib: float = 10.0,
    temporal_port: int = 0,
    ui_port: int = 0,
    ray_port: int = 0,
    say: Say = print,
) -> Stack:
    """Start the stack of ``home`` and wait until it answers; idempotent.

    A stack that runs is returned; what has died of it, Ray apart, is started again in its place.
    What is left of one whose Ray is gone is ended first. Interrupted, it leaves nothing.

    Args:
        gpus: GPUs of the Ray head, pretended where the machine has none; None: as many as the last
            stack of this home had, whose runs go on; else the machine's own, or two.
        at_least: GPUs that somebody needs where ``gpus`` is None.
        worker: whether a Temporal worker belongs to it.
        memory_gib: memory that must be free.
        temporal_port, ui_port, ray_port: 0: those of the last stack of this home, else 7233 and
            8233, if they are free; any other otherwise.

    Raises:
        StackError: a port in use, a program missing, too little memory, something that did not
            start. Nothing is left.
    """
    home = home.absolute()
    with _stack_file.locked(home):
        asked = {"Temporal": temporal_port, "Temporal's web UI": ui_port, "Ray": ray_port}
        running = _running(home, gpus, at_least, asked, say)
        if running is not None:
            return running
        check_memory(memory_gib)
        for name in ("temporal", "ray"):
            binary(name)
        last = _stack_file.last_stack(home)
        if gpus is not None and gpus < last.gpus:
            say(f"The last stack here had {last.gpus} GPUs: its runs that need them wait.")
        with Ports() as ports:
            stack = Stack.new(
                home,
                gpus=gpus or max(at_least, last.gpus) or _real_gpus() or _GPUS,
                worker=worker,
                temporal_port=ports.choose("Temporal", temporal_port, last.temporal, 7233),
                ui_port=ports.choose("Temporal's web UI", ui_port, last.ui, 8233),
                metrics_port=ports.choose("Temporal's metrics"),
                worker_ports=(ports.choose("metrics"), ports.choose("the SDK's metrics")),
                ray_port=ports.choose("Ray", ray_port),
            )
            try:
                stack.start(say)
            except BaseException:
                with _undisturbed():
                    stack.end(say)
                raise
        return stack


def down(home: Path, say: Say = print) -> DownReport:
    """End every process of the stack of ``home``; its store and database stay. Idempotent.

    Raises:
        StackError: another ``up`` or ``down`` is at work there.
    """
    home = home.absolute()
    if not _stack_file.was_used(home):
        return _nothing(home, say)
    with _stack_file.locked(home), _undisturbed():
        record = _stack_file.read(home)
        if record is None:
            return _nothing(home, say)
        report = Stack(record).end(say)
        rest = f"; killed {len(report.killed)} more" if report.killed else ""
        say(f"Ended {', '.join(report.ended) or 'nothing: all were gone'}{rest}.")
        return report


def _nothing(home: Path, say: Say) -> DownReport:
    say(f"No local stack in {home}.")
    return DownReport((), (), ())


def _running(
    home: Path, gpus: int | None, at_least: int, ports: Mapping[str, int], say: Say
) -> Stack | None:
    """The stack of ``home`` with everything running, None after ending what is left of it."""
    record = _stack_file.read(home)
    if record is None:
        return None
    stack = Stack(record)
    missing = stack.missing()
    if record.ready and not missing:
        say(f"The stack in {home} runs already: web UI {stack.temporal_ui}")
        _say_ignored(record, gpus, at_least, ports, say)
        return stack
    if record.ready and "ray" not in missing:
        say(f"The stack in {home} runs without {', '.join(missing)}; starting again.")
        stack.start(say)
        _say_ignored(record, gpus, at_least, ports, say)
        return stack
    say(f"Ending what is left of an earlier stack in {home}.")
    report = stack.end(say)
    if report.left:
        raise StackError(f"Processes {report.left} of an earlier stack in {home} cannot be ended.")
    return None


def _say_ignored(
    record: StackRecord, gpus: int | None, at_least: int, ports: Mapping[str, int], say: Say
) -> None:
    """Of a stack that runs nothing can be changed."""
    has = {
        "Temporal": record.temporal_address,
        "Temporal's web UI": record.temporal_ui,
        "Ray": record.ray_address,
    }
    others = [
        f"{what} is at {has[what]}, not at port {port}"
        for what, port in ports.items()
        if port and not has[what].rstrip("/").endswith(f":{port}")
    ]
    if gpus not in (None, record.gpus):
        others.insert(0, f"it has {record.gpus} GPUs, not {gpus}")
    elif record.gpus < at_least:
        others.insert(0, f"it has {record.gpus} GPUs, {at_least} are needed")
    if others:
        say(f"Unchanged: {'; '.join(others)}. `relax-infer down` first for another.")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """An interrupt waits until the block is done: half an end is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _real_gpus() -> int:
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit())


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start, end = commands.add_parser("up"), commands.add_parser("down")
    for command in (start, end):
        command.add_argument("--home", type=Path, required=True)
    start.add_argument("--gpus", type=int)
    start.add_argument("--at-least", type=int, default=0, help="GPUs, if --gpus is left out")
    start.add_argument("--memory-gib", type=float, default=10.0)
    start.add_argument("--no-worker", action="store_true")
    for name in ("temporal", "ui", "ray"):
        start.add_argument(f"--{name}-port", type=int, default=0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        if options.command == "down":
            return 1 if down(options.home, say).left else 0
        up(
            options.home,
            gpus=options.gpus,
            at_least=options.at_least,
            worker=not options.no_worker,
            memory_gib=options.memory_gib,
            temporal_port=options.temporal_port,
            ui_port=options.ui_port,
            ray_port=options.ray_port,
            say=say,
        )
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; what was being started is ended.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
