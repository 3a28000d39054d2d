"""How a step gets GPUs for its roles, and when each lets go of them."""

from relax_infer.contracts.lease import LeaseAnswer, LeaseMethod
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import RunPlan
from workflows._failures import PERMANENT, fail
from workflows._lease_client import LeaseClient


class StepGpus:
    """Roles that hold GPUs for one step, and its batch's gate.

    A role lets go as soon as another that shares its GPUs needs them: after its work, or before the
    commit if it shares them with the trainer alone, or never if with nobody.

    Args:
        batch: of the step, as the lease knows it.
    """

    def __init__(self, lease: LeaseClient, plan: RunPlan, batch: str) -> None:
        self._lease, self._plan, self._batch = lease, plan, batch
        self._holding: list[str] = []
        """Roles to let go, in the order in which they were taken."""
        self._in_batch = False

    async def begin_batch(self, weights: WeightsRef) -> None:
        """The policy is awake with these weights, and the batch is open."""
        self._in_batch = True
        await self.take("begin_batch", "rollout", weights=weights)

    async def commit_batch(self) -> None:
        """Every role has let go that shares GPUs; the trainer may read from now on."""
        for role in tuple(self._holding):
            await self._hand_back(role)
        await self._lease.take("commit_batch", batch=self._batch)
        self._in_batch = False

    async def fail_batch(self, why: str) -> None:
        """Close the gate with the cause, if it is open."""
        if self._in_batch:
            await self._lease.take("fail_batch", batch=self._batch, message=why)

    async def take(
        self,
        method: LeaseMethod,
        role: str,
        *,
        purpose: str | None = None,
        weights: WeightsRef | None = None,
    ) -> LeaseAnswer:
        """Get the GPUs for ``role``; the policy's ``weights`` are read back from each engine."""
        if role not in self._holding:
            self._holding.append(role)
        batch = self._batch if method != "acquire" or purpose == "train" else None
        granted = await self._lease.take(
            method,
            None if method == "begin_batch" else role,
            batch=batch,
            purpose=purpose,
            weights=weights,
        )
        if weights is not None and granted.weight_version != weights.version:
            raise fail(
                PERMANENT,
                f"the {role} engines hold weights {granted.weight_version}, not {weights.version}",
            )
        return granted

    async def done_with(self, role: str) -> None:
        """Let go of the role's GPUs if another may want them before the batch is committed."""
        sharing = self._plan.sharing(role)
        if not sharing:
            self._holding.remove(role)
        elif not self._in_batch or sharing != ("trainer",):
            await self._hand_back(role)

    def to_let_go(self) -> tuple[str, ...]:
        """Roles that hold GPUs which others need, too."""
        return tuple(role for role in self._holding if self._plan.sharing(role))

    async def let_go(self, role: str) -> None:
        await self._lease.release(role, batch=self._batch if self._in_batch else None)
        self._holding.remove(role)

    async def _hand_back(self, role: str) -> None:
        await self.let_go(role)
        if role == "rollout" and self._in_batch:
            await self._lease.take("acknowledge_rollout_offloaded", batch=self._batch)
