"""Router and gateway of a run."""

from temporalio import activity

from relax_infer.contracts.batch import RegistryPush
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import FrontAddress
from relax_infer.gateway.front import Front


@activity.defn
async def ensure_front(run: RunRef) -> FrontAddress:
    """Router and gateway answer; whichever was dead is started again on its port."""
    return await Front(run.run).ensure()


@activity.defn
async def push_registry(push: RegistryPush) -> FrontAddress:
    """The router holds the named workers and the gateway the document, or a newer one."""
    front = Front(push.run.run)
    address = await front.ensure()
    await front.push(push)
    return address


@activity.defn
async def stop_front(run: RunRef) -> RunRef:
    """Router and gateway are gone."""
    await Front(run.run).stop()
    return run


ACTIVITIES = (ensure_front, push_registry, stop_front)
