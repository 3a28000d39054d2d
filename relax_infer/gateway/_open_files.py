"""Open files that a gateway needs: one for each caller's connection, one for each backend's."""

import logging
import resource

log = logging.getLogger(__name__)

_OTHERS = 128
"""Sockets to listen on, logs, tokenizers, aborts."""


def allow_files(connections: int) -> None:
    """Raise the process's limit as far as it may be, and say so where that is not enough.

    Args:
        connections: to backends; as many callers are counted on.
    """
    needed = 2 * connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    except (OSError, ValueError):
        most = soft
    if most < needed:
        log.warning(
            "%d connections need %d open files and this process may have %d: raise the limit"
            " (ulimit -n %d, LimitNOFILE=, or the container's nofile), or start the gateway with"
            " --connections %d.",
            *(connections, needed, most, needed, max((most - _OTHERS) // 2, 1)),
        )
