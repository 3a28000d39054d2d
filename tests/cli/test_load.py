"""What a look asks the run's gateway."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from relax_infer.cli._watching import _load
from relax_infer.discovery import Role
from relax_infer.gateway.intake import RegistryIntake
from relax_infer.gateway.metrics import Metrics


@pytest.fixture
def gateway() -> Iterator[str]:
    """The metrics of a gateway with two requests of the judge under way, and one of the policy."""
    metrics = Metrics(RegistryIntake())
    for role in (Role.GENRM, Role.GENRM, Role.ROLLOUT):
        metrics.route(role, "/generate").begin()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(metrics.text())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_requests_in_flight_are_told_by_role_and_not_of_the_policy(gateway: str):
    """Its requests go to the router, past the gateway."""
    assert asyncio.run(_load(gateway)) == {"genrm": 2}


def test_a_gateway_that_cannot_be_reached_tells_nothing():
    assert asyncio.run(_load("http://127.0.0.1:1")) == {}
    assert asyncio.run(_load(None)) == {}
