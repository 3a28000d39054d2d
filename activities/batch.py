"""From scores to a published, finalised batch."""

import asyncio

from temporalio import activity

from activities._run_files import recipe_of, store_of, task_of
from relax_infer.contracts.batch import (
    FinaliseRequest,
    FinaliseResult,
    PublishRequest,
    PublishResult,
    WriteBackRequest,
    WriteBackResult,
)
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.refs import RunRef
from relax_infer.scoring import batch_metrics, export_samples, write_back
from relax_infer.transfer import (
    clear_partition as clear,
)
from relax_infer.transfer import (
    close_queue,
    open_queue,
    partition_name,
    publish,
)


@activity.defn
async def write_back_scores(request: WriteBackRequest) -> WriteBackResult:
    """Scores joined to the samples in a new file, or an error that names what is missing."""
    return await asyncio.to_thread(
        write_back,
        store_of(request.run),
        request.step,
        generated=request.generated,
        judged=request.judged,
        taught=request.taught,
        task=task_of(request.run),
        recipe=recipe_of(request.run),
    )


@activity.defn
async def open_transfer_queue(run: RunRef) -> RunRef:
    """TransferQueue answers under its detached owner."""
    await open_queue()
    return run


@activity.defn
async def publish_batch(request: PublishRequest) -> PublishResult:
    """The scored rows under their keys in the step's partition, read back. A queue that died is
    made again; what other runs had in it they put back themselves."""
    table = await asyncio.to_thread(store_of(request.run).read_table, request.scored)
    partition = partition_name(request.run.run, request.step)
    try:
        return await publish(partition, table)
    except TransientError:
        await open_queue()
        return await publish(partition, table)


@activity.defn
async def clear_partition(request: PublishRequest) -> RunRef:
    """The step's partition is gone from TransferQueue."""
    await clear(partition_name(request.run.run, request.step))
    return request.run


@activity.defn
async def close_transfer_queue(run: RunRef) -> RunRef:
    """No partition of this run is left; the queue itself stays for other runs."""
    await close_queue(run.run)
    return run


@activity.defn
async def finalise_batch(request: FinaliseRequest) -> FinaliseResult:
    """Metrics and sample export, from the scored rows that were published."""

    def finalise() -> FinaliseResult:
        store = store_of(request.run)
        table = store.read_table(request.scored)
        metrics = batch_metrics(
            table,
            task_of(request.run),
            dropped_groups=request.dropped_groups,
            drop_reasons=request.drop_reasons,
        )
        return FinaliseResult(metrics=metrics, export=export_samples(store, request.step, table))

    return await asyncio.to_thread(finalise)


ACTIVITIES = (
    write_back_scores,
    open_transfer_queue,
    publish_batch,
    clear_partition,
    close_transfer_queue,
    finalise_batch,
)
