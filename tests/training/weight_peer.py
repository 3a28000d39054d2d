"""A rank of an engine in a few lines: it joins a group as SGLang's ranks do and takes broadcasts.

``python -m tests.training.weight_peer PORT NAME RANK WORLD DIES_AFTER SIZE ...`` prints the SHA-256
of everything that it got. What SGLang itself does is in tests/engines/test_real_weights.py.
"""

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d


def main() -> None:
    port, name, rank, world, dies_after, *sizes = sys.argv[1:]
    distributed: Any = torch.distributed
    inner: Any = distributed_c10d
    # Its engine's own group, to which the other has nothing to do.
    own = distributed.HashStore()
    distributed.init_process_group("gloo", store=own, rank=0, world_size=1)
    timeout = inner.default_pg_timeout
    address = f"tcp://127.0.0.1:{port}"
    store, _, _ = next(inner.rendezvous(address, int(rank), int(world), timeout=timeout))
    store.set_timeout(timeout)
    group, _ = inner._new_process_group_helper(
        int(world),
        int(rank),
        [],
        inner.Backend("gloo"),
        inner.PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    inner._world.pg_group_ranks[group] = {k: k for k in range(int(world))}
    hasher = hashlib.sha256()
    for number, size in enumerate(map(int, sizes)):
        if number == int(dies_after):
            os.kill(os.getpid(), signal.SIGKILL)
        got = torch.empty(size, dtype=torch.uint8)
        distributed.broadcast(got, src=0, group=group)
        hasher.update(got.numpy())
    print(hasher.hexdigest())
    distributed.destroy_process_group(group)


if __name__ == "__main__":
    main()
