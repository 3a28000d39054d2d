"""A server of real processes in a few lines, in place of SGLang where only those matter.

Takes the command line of the real one. The head answers ``/health`` on its management socket, as
soon as ``RELAX_TEST_FOLLOWERS`` of its folder are there; a follower says that it is and sleeps.
"""

import http.server
import socketserver
import sys
import time
from pathlib import Path


def argument(name: str, default: str = "") -> str:
    given = sys.argv
    return given[given.index(name) + 1] if name in given else default


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    meeting = Path(argument("--model-path"))
    rank = argument("--node-rank", "0")
    if (meeting / f"fail-{rank}").exists():
        sys.exit(f"rank {rank} cannot start here")
    if rank != "0":
        (meeting / f"met-{argument('--dist-init-addr')}-{rank}").touch()
        time.sleep(600)
    awaited = int(argument("--nnodes", "1")) - 1
    while len(list(meeting.glob(f"met-{argument('--dist-init-addr')}-*"))) < awaited:
        time.sleep(0.02)
    path = argument("--fence-socket")
    with socketserver.UnixStreamServer(path, Health) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
