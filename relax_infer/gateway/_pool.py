"""Connections to backends that are kept between requests, and a limit of requests under way."""

import asyncio
import ssl
from collections import deque
from typing import NamedTuple

from relax_infer.gateway._connection import Broken, Connection, Response, Sink

KEEP_ALIVE = 3.0
"""Seconds. An SGLang server hangs up idle connections after 5; a POST must not meet that."""
CONNECT_TIMEOUT = 10.0


class Origin(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    tls: bool


class Pool:
    """At most ``limit`` requests are under way; others wait their turn, first come first served.

    Idle connections count towards the limit, too: the oldest makes room for one to elsewhere.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: dict[Origin, list[Connection]] = {}
        """The longest idle first."""
        self._connections: dict[Connection, Origin] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    def send_now(self, origin: Origin, head: bytes, body: bytes, sink: Sink) -> bool:
        """Send once, if there is a connection that waits for a request; false: nothing was sent."""
        if not self._free or not (connection := self._newest(origin)):
            return False
        connection.send(head, body, sink)
        self._free -= 1
        return True

    async def send_soon(self, origin: Origin, head: bytes, body: bytes, sink: Sink) -> None:
        """Send once, when it is this request's turn.

        Raises:
            Broken: no connection; nothing was sent.
        """
        await self._turn()
        try:
            connection = self._newest(origin) or await self._connect(origin)
            connection.send(head, body, sink)
        except BaseException:
            self._give_turn()
            raise

    async def send(self, origin: Origin, head: bytes, body: bytes) -> Response:
        """Send once; returns with the answer's head. The response must be closed.

        Raises:
            Broken: no connection, or it ended before the answer's head.
        """
        response = Response(asyncio.get_running_loop())
        if not self.send_now(origin, head, body, response):
            await self.send_soon(origin, head, body, response)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        """Hang up on everybody."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for connection in list(self._connections):
            self._forget(connection)
            connection.hang_up()

    async def _turn(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had come, and nobody takes it
                self._give_turn()
            raise

    def _give_turn(self) -> None:
        """To whoever waits longest; only then are there free ones."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _newest(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        if not idle:
            return None
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE
        while idle:
            connection = idle.pop()
            if connection.open and connection.idle_since > oldest:
                return connection
            self._forget(connection)
            connection.hang_up()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        if len(self._connections) >= self._limit:
            self._make_room()
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._over, self._forget),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except OSError as error:  # a timeout is one
            raise Broken(str(error) or type(error).__name__) from error
        self._connections[connection] = origin
        return connection

    def _over(self, connection: Connection, usable: bool) -> None:
        """A request's answer has ended or broken off."""
        self._give_turn()
        origin = self._connections.get(connection)
        if usable and origin is not None:
            loop = asyncio.get_running_loop()
            connection.idle_since = loop.time()
            self._idle.setdefault(origin, []).append(connection)
            if self._sweeping is None:
                self._sweeping = loop.call_later(KEEP_ALIVE, self._sweep)

    def _forget(self, connection: Connection) -> None:
        origin = self._connections.pop(connection, None)
        if origin is not None and connection in (idle := self._idle.get(origin, [])):
            idle.remove(connection)

    def _make_room(self) -> None:
        oldest = min(
            (idle[0] for idle in self._idle.values() if idle),
            key=lambda connection: connection.idle_since,
            default=None,
        )
        if oldest is not None:
            self._forget(oldest)
            oldest.hang_up()

    def _sweep(self) -> None:
        """Hang up on those that nobody would take any more."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEP_ALIVE
        for idle in list(self._idle.values()):
            while idle and idle[0].idle_since <= oldest:
                connection = idle[0]
                self._forget(connection)
                connection.hang_up()
        self._idle = {origin: idle for origin, idle in self._idle.items() if idle}
        self._sweeping = loop.call_later(KEEP_ALIVE, self._sweep) if self._idle else None
