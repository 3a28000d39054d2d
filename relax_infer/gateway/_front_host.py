"""What the front needs of its host: a folder, ports that are free, and children that answer."""

import asyncio
import hashlib
import json
import logging
import os
import random
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp

import relax_infer
from relax_infer.contracts.batch import Judging
from relax_infer.contracts.failures import TransientError
from relax_infer.gateway._child import Child

log = logging.getLogger(__name__)

_PORT_TIMEOUT = 10.0
"""Seconds that a dead child's port may take to become free."""
_PORTS = range(20_000, 30_000)
"""Below those that the kernel gives to outgoing connections, which could take a port that we want
back, and apart from those that Ray and SGLang take by default."""
_POLL = 0.1
_CHECKOUT = Path(relax_infer.__file__).parents[1]
"""Where the ``workers`` package is; it is not installed."""


def arguments_of(judging: Judging) -> list[str]:
    """Of ``workers.gateway``."""
    given: list[str] = []
    for model, kwargs in judging.template_kwargs.items():
        given += ("--genrm-template-kwargs", f"{model}={json.dumps(kwargs)}")
    if judging.max_new_tokens is not None:
        given += ("--genrm-max-new-tokens", str(judging.max_new_tokens))
    return given


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **extra}
    paths = [str(_CHECKOUT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    return environment


def private_folder() -> Path:
    """Short, since the path of a Unix socket has about 100 bytes; nobody else may look in."""
    folder = Path(tempfile.gettempdir()) / f"relax-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def fingerprint(environment: Mapping[str, str]) -> str:
    told = {k: v for k, v in environment.items() if k == "RELAX_STACK" or k[:9] == "TEMPORAL_"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


async def port_of(host: str, kept: int) -> int:
    """``kept``, unless a stranger has it; 0: any free one.

    A process that was killed shows as ended before its last thread has let go of its sockets.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _PORT_TIMEOUT
    while kept:
        if _free(host, kept):
            return kept
        if loop.time() > deadline:
            log.warning("port %d is taken by another process; choosing a new one", kept)
            break
        await asyncio.sleep(_POLL)
    for port in random.sample(_PORTS, 100):
        if _free(host, port):
            return port
    raise TransientError(f"no free port on {host} between {_PORTS.start} and {_PORTS.stop}.")


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


async def _answers(url: str, path: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            # It is our own child, and is told nothing: any certificate will do.
            session.get(url + path, ssl=False) as answer,
        ):
            # A router without workers says 503 to /health: it answers, which is all that is asked.
            return answer.status < 500 or answer.status == 503
    except (aiohttp.ClientError, OSError):
        return False


async def up(child: Child, url: str, path: str, timeout: float) -> None:
    """Wait until it answers; raises TransientError if it ends first or stays silent."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while not await _answers(url, path):
        if not child.alive:
            raise child.died("it was waited for")
        if loop.time() > deadline:
            raise TransientError(
                f"{child.name} did not answer {url}{path} within {timeout:g} s; the end of"
                f" {child.log}:\n{child.tail()}"
            )
        await asyncio.sleep(_POLL)
