"""Starting and ending the local stack: ``python -m workers.local`` of the checkout."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import relax_infer
from relax_infer.cli._errors import INTERRUPTED, Code, CommandError
from relax_infer.cli._home import LocalStack, read_stack
from relax_infer.cli._options import said_home
from relax_infer.contracts.failures import RelaxError

Say = Callable[[str], object]
_LOOK_SECONDS = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StackFailedError(CommandError):
    """The stack's own process failed in a way it did not foresee."""

    code = Code.FAILED


def checkout() -> Path:
    """Folder that holds ``workers``, ``workflows`` and ``activities`` beside ``relax_infer``.

    Raises:
        CommandError: the package is installed alone.
    """
    package = Path(relax_infer.__file__).resolve().parent
    if not (package.parent / "workers" / "local.py").is_file():
        raise CommandError(
            f"There is no workers/ beside {package}: workers and the local stack run from a"
            " checkout, the package alone is a client.",
            cure="Clone the repository and install it with `pip install -e .`, or set"
            " TEMPORAL_ADDRESS to a cluster whose workers run elsewhere.",
        )
    return package.parent


def module_environment(root: Path, **changes: str) -> dict[str, str]:
    """This process's variables with the checkout first on Python's path."""
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    joined = os.pathsep.join(dict.fromkeys(paths))
    return {**os.environ, "PYTHONPATH": joined, **changes}


def start_stack(home: Path, options: Sequence[str], say: Say) -> LocalStack:
    """Start what does not run of the stack of ``home``; idempotent.

    Raises:
        CommandError: it cannot be started as asked; nothing of it is left.
        KeyboardInterrupt: nothing is left.
    """
    _call("up", home, options, say)
    stack = read_stack(home)
    if stack is None:
        raise StackFailedError(
            f"The stack in {home} was ended while it started.", cure="Run `relax-infer up` again."
        )
    return stack


def end_stack(home: Path, say: Say) -> None:
    """End every process of the stack of ``home``; its store stays. Idempotent.

    Raises:
        CommandError: something could not be ended.
    """
    _call("down", home, (), say)


def end_stack_under_runs(home: Path, say: Say) -> None:
    """The same, and say which runs go on once it is up again."""
    waiting = runs_that_go_on(home)
    end_stack(home, say)
    if waiting:
        say(
            f"{', '.join(waiting)} had not ended: `relax-infer up{said_home(home)}` goes on with"
            f" {'it' if len(waiting) == 1 else 'them'}."
        )


def runs_that_go_on(home: Path) -> list[str]:
    """Ids of the runs of the stack of ``home``; none where nobody can be asked."""
    return asyncio.run(_waiting(home)) if read_stack(home) is not None else []


async def _waiting(home: Path) -> list[str]:
    from relax_infer.cli._runs import open_runs

    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            return await open_runs(home)
    except (RelaxError, TimeoutError):  # its server is dead, or busy: there is nobody to ask
        return []


def worker_environment(home: Path) -> dict[str, str]:
    """Variables of a worker: of the stack of ``home`` if there is one, else this process's own.

    Raises:
        CommandError: neither says where Ray is.
    """
    root = checkout()
    stack = read_stack(home)
    if stack is not None:
        return _environment_of(stack, root)
    if not os.environ.get("RAY_ADDRESS"):
        raise CommandError(
            f"No local stack in {home}, and RAY_ADDRESS is not set: a worker needs a Ray cluster.",
            cure="Set RAY_ADDRESS and TEMPORAL_ADDRESS, or start a stack with `relax-infer up`.",
        )
    return module_environment(root, RELAX_HOME=str(home.absolute()))


def _environment_of(stack: LocalStack, root: Path) -> dict[str, str]:
    """Nothing that points at other servers, and not the stack's marker: `down` ends what `up`
    started, a person ends this one."""
    others = ("TEMPORAL_", "RAY_")
    own = {k: v for k, v in module_environment(root).items() if not k.startswith(others)}
    return {
        **own,
        **stack.variables,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), own.get("PATH", os.defpath))),
        "RELAX_HOME": str(stack.home),
        "TEMPORAL_CONFIG_FILE": os.devnull,
    }


def _call(command: str, home: Path, options: Sequence[str], say: Say) -> None:
    root = checkout()
    arguments = (command, "--home", str(home.absolute()), *options)
    with tempfile.TemporaryFile() as errors, _interruptible():
        # Beside the checkout, not beside a stranger's workers/ in the current folder; in a session
        # of its own, so that an interrupt reaches it once, from here.
        process = subprocess.Popen(
            (sys.executable, "-m", "workers.local", *arguments),
            cwd=root,
            env=module_environment(root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            _pass_on(process, say)
        except BaseException:
            process.terminate()
            with _undisturbed():
                _pass_on(process, say)
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip()
    if process.returncode == 0:
        return
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode == Code.BAD_INPUT:
        raise CommandError(text or f"The local stack refused `{command}` without a word.")
    raise StackFailedError(
        f"`{command}` of the local stack ended with {process.returncode}: {text}".rstrip(": "),
        cure=f"Its logs are in {home / 'logs'}; `relax-infer down` ends what is left.",
    )


def _pass_on(process: "subprocess.Popen[str]", say: Say) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip())
    process.wait()


@contextmanager
def _interruptible() -> Iterator[None]:
    """A request to end is a KeyboardInterrupt here: the process started here must hear of it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt):
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def _handling(handler: "Callable[..., None] | signal.Handlers") -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
