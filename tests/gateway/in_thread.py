"""A gateway with an engine behind it in a thread of its own, for callers that block."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App
from relax_infer.gateway.judge import ChatTemplates
from tests.gateway.fakes import Answer, Engine, engine, gateway


@dataclass
class InThread:
    url: str
    engine: Engine


@contextlib.contextmanager
def running(
    answer: Answer, tokenizers: Mapping[str, str], wrap: Callable[[App], App] = lambda app: app
) -> Iterator[InThread]:
    """Serves all roles from one engine."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    made: list[InThread] = []
    stop = asyncio.Event()

    async def serve() -> None:
        render = ChatTemplates(tokenizers)
        async with engine(answer) as upstream, gateway(genrm_render=render, wrap=wrap) as front:
            for role in Role:
                front.publish(role, upstream.url)
            made.append(InThread(front.url, upstream))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(30), "it did not start"
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
