"""Whether an actor is where its GPUs were bound: Ray moves the bundles of a lost node elsewhere.

The files and processes of another host say nothing about what it holds, and another device may be
somebody else's.
"""

from typing import NamedTuple

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.host import HostIdentity
from relax_infer.engines.host_processes import this_host


class Place(NamedTuple):
    """Where an actor is."""

    node_ip: str
    gpu_ids: tuple[int, ...]
    """That Ray lent to it: one, in the first of its bundles."""
    host: HostIdentity


def check_place(name: str, bound: BundleBinding, *, loads: bool = False) -> None:
    """Refuse to speak for ``name`` from another host than it was ``bound`` on; and, where it
    ``loads``, from another device.

    Outside of Ray there is nothing to compare.

    Raises:
        UnconfirmedError: this is not the host that the GPUs were bound on.
        PermanentError: it is, and Ray lends another of its GPUs now.
    """
    here = where_this_is()
    if here is None:
        return
    if here.node_ip != bound.node_ip or not _same_host(bound, here.host):
        raise UnconfirmedError(
            f"{name} was bound on {bound.node_ip} ({bound.host or 'host not recorded'}); its"
            f" actor came up on {here.node_ip} ({here.host}), which proves nothing.",
            cure=f"Bring {bound.node_ip} back, or resolve it once its server is known to be gone.",
        )
    if loads and here.gpu_ids and here.gpu_ids[0] != bound.gpu_id:
        raise PermanentError(
            f"{name} was bound to GPU {bound.gpu_id} of {bound.node_ip}; since that node was"
            f" lost Ray lends it GPU {here.gpu_ids[0]}.",
            cure="Start the run anew, which binds its GPUs again (`relax-infer resolve --help`).",
        )


def _same_host(bound: BundleBinding, here: HostIdentity) -> bool:
    return bound.host is None or here == bound.host or here.booted_since(bound.host)


def where_this_is() -> Place | None:
    """Of the actor that asks; None in a process that belongs to no Ray cluster."""
    import ray

    if not ray.is_initialized():
        return None
    import ray.util

    gpu_ids = tuple(int(each) for each in ray.get_gpu_ids() if str(each).isdecimal())
    return Place(ray.util.get_node_ip_address(), gpu_ids, this_host())
