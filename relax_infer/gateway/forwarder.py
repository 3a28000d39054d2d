"""Passes requests on to one HTTP server, each once, and its answers back as they came."""

import asyncio
import logging
from collections.abc import Iterable
from urllib.parse import quote

from relax_infer.gateway._answers import Answer, Exchange, send_answer, stream_of
from relax_infer.gateway._asgi import Headers, Receive, Scope, Send, reply
from relax_infer.gateway._caller import Caller
from relax_infer.gateway._connection import Broken, Response
from relax_infer.gateway._deadline import Deadline
from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._headers import Sent, to_backend, to_caller
from relax_infer.gateway._open_files import allow_files
from relax_infer.gateway._upstream import Upstream

log = logging.getLogger(__name__)

METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_ASIDE = 64
"""Questions of our own at once."""
_UNAVAILABLE = "Inference backend is unavailable"


class Forwarder:
    """One server behind this process.

    A request is sent at most once. What cannot be had of the server is told as the gateway tells
    it: 502 where it cannot be reached, breaks off or redirects, 504 after the deadline. Its own
    statuses, headers and bytes are passed on, but for the headers of one hop.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 1800.0,
        max_connections: int = 4096,
        key: str | None = None,
        drops: Iterable[bytes] = (),
    ) -> None:
        """
        Args:
            timeout: seconds for one request, its stream included.
            max_connections: requests under way; others wait. The process's limit of open files is
                raised for them.
            key: bearer token of the server; what a caller brings is then not passed on.
            drops: further headers, in lower case, that are not passed on.
        """
        self.base_url = base_url.rstrip("/")
        self._timeout = timeout
        allow_files(max_connections)
        self._upstream = Upstream(max_connections)
        self._aside = Upstream(_ASIDE)
        self._own: Sent = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        # What was encoded for a caller could not be read on the way.
        self._drops = {b"accept-encoding", *drops, *(name for name, _ in self._own)}

    async def forward(
        self, scope: Scope, body: bytes, receive: Receive, send: Send, *, stream: bool
    ) -> bool:
        """Answer one request.

        Args:
            scope: path and query are passed on as they are in it.
            body: all of it. ``receive`` is asked for nothing but that the caller has left.
            stream: pass parts on as they come; else the answer is read to its end before.

        Returns:
            Whether the server has answered to the end, and so has nothing more to do for it.
        """
        task = asyncio.current_task()
        assert task is not None
        caller = Caller(task, {}, receive)
        exchange, started = Exchange(), False
        try:
            with Deadline(task, self._timeout):
                caller.watch()
                answer = await self._ask(scope, body, exchange, stream)
                started = True
                await send_answer(send, answer)
                return True
        except GatewayError as error:
            failure = GatewayError(error.status, error.detail, error.headers)
        except TimeoutError:
            failure = GatewayError(504, "Inference request timed out")
        except asyncio.CancelledError:
            if not caller.left:
                raise
            task.uncancel()
            return exchange.finished
        finally:
            caller.let_go()
            if exchange.upstream is not None:
                exchange.upstream.close()
        if started:  # too late for a status; a connection that ends without an end tells the caller
            log.warning("%s: answer broken off: %s", scope["path"], failure)
        else:
            await reply(send, failure.status, {"detail": failure.detail}, failure.headers)
        return exchange.finished

    async def question(
        self, method: str, path: str, body: bytes = b"", *, timeout: float = 5.0
    ) -> tuple[int, bytes] | None:
        """Of our own, beside the callers' connections: status and body; None: no answer in time."""
        try:
            async with asyncio.timeout(timeout):
                response = await self._aside.request(
                    method, self.base_url, path, to_backend(self._own), body
                )
                try:
                    return response.status, await response.read()
                finally:
                    response.close()
        except (GatewayError, Broken, TimeoutError):
            return None

    async def close(self) -> None:
        """Hang up on the server."""
        await self._upstream.close()
        await self._aside.close()

    async def _ask(self, scope: Scope, body: bytes, exchange: Exchange, stream: bool) -> Answer:
        """Raises GatewayError."""
        if scope["method"] not in METHODS:
            exchange.finished = True
            raise GatewayError(405, f"{scope['method']} is not passed on")
        response = await self._upstream.request(
            scope["method"], self.base_url, _target(scope), self._headers(scope), body
        )
        exchange.upstream = response
        if 300 <= response.status < 400:
            raise GatewayError(502, f"Inference backend answered {response.status}")
        if stream and response.status < 300:
            return await stream_of(response, exchange)
        whole = await _whole(response)
        exchange.finished = True
        return Answer(
            response.status, to_caller(response.headers, buffered=True, decoded=False), whole
        )

    def _headers(self, scope: Scope) -> Sent:
        headers: Headers = scope["headers"]
        kept = [pair for pair in headers if pair[0].lower() not in self._drops]
        return to_backend([*kept, *self._own])


def _target(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    return quote(scope["path"]) + (f"?{query}" if query else "")


async def _whole(response: Response) -> bytes:
    """Raises GatewayError: it broke off."""
    try:
        return await response.read()
    except Broken as error:
        raise GatewayError(502, _UNAVAILABLE) from error
