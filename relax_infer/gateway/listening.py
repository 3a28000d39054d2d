"""Where a server of ours listens: a TCP port, or a Unix socket of its user alone."""

import socket
from pathlib import Path

from relax_infer.contracts.failures import PermanentError

_SOCKET_PATH_LIMIT = 100


def listen_tcp(host: str, port: int, who: str = "gateway") -> socket.socket:
    """IPv4 or IPv6; port 0 takes any free one.

    Raises:
        PermanentError: the port is in use, or the address is none of this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PermanentError(
            f"the {who} cannot listen on {host}:{port}: {reason}.",
            cure="Choose another port, or end whatever listens there.",
        ) from error


def listen_unix(path: Path, who: str = "gateway") -> socket.socket:
    """A socket of mode 0600, made anew, in a folder of mode 0700 where that is made, too.

    Raises:
        PermanentError: somebody listens on it, or its path is too long.
    """
    if len(str(path).encode()) > _SOCKET_PATH_LIMIT:
        raise PermanentError(
            f"the socket path {path} is longer than {_SOCKET_PATH_LIMIT} bytes.",
            cure="Choose a shorter folder.",
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise PermanentError(
                f"another {who} listens on {path}.",
                cure="End it first, or give this one another socket.",
            )
    path.unlink(missing_ok=True)  # left by one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return listener
