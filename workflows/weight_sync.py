"""WeightSync: brings one published version of the policy's weights to every policy engine."""

from temporalio import workflow

from relax_infer.contracts.mailbox import Answer
from relax_infer.contracts.run import WeightSyncInput, WeightSyncResult
from workflows._failures import PERMANENT, fail
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox
from workflows._versions import PINNED
from workflows._visible import show_details, show_state, show_weights


@workflow.defn(name="WeightSync", versioning_behavior=PINNED)
class WeightSync:
    """The rollout role gets the GPUs, loads, is read back, lets go; where it keeps them, the lease
    has it let go and load anew."""

    @workflow.init
    def __init__(self, start: WeightSyncInput) -> None:
        self._mail = Mailbox()
        self._lease = LeaseClient(self._mail, start.run.run)

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.run
    async def run(self, start: WeightSyncInput) -> WeightSyncResult:
        weights = start.weights
        show_weights(weights.version)
        show_state("LOADING")
        show_details(f"Version {weights.version} goes to every policy engine.")
        granted = await self._lease.take(
            "acquire", "rollout", purpose="weight_sync", weights=weights
        )
        if not start.resident:
            await self._lease.release("rollout")
        if granted.weight_version != weights.version or granted.weights_digest is None:
            raise fail(
                PERMANENT,
                f"the engines hold version {granted.weight_version} (digest"
                f" {granted.weights_digest}) and not all of them version {weights.version}",
            )
        show_state("DONE")
        show_details(f"Every policy engine holds version {weights.version}, read back.")
        return WeightSyncResult(
            version=weights.version,
            digest=granted.weights_digest,
            engines=len(granted.holders),
        )
