"""In defer the Teacher's outputs are in the batch before anything is trained on it."""

from typing import Any

import pyarrow as pa
import pytest
from temporalio import activity

from relax_infer.contracts import batch as b
from relax_infer.machines import RunState
from relax_infer.samples import StagingStore
from relax_infer.transfer.rows import rows_of_table
from tests.samples.conftest import phase, recipe, settled, store, upstream
from tests.samples.upstream import Upstream
from tests.scoring.test_scoring import YES, joined, judged, staged, taught
from tests.workflows.scripted_world import ScriptedWorld
from tests.workflows.test_training_run import Working, lease, nothing_was_broken, start

__all__ = ["phase", "recipe", "settled", "store", "upstream"]


@pytest.mark.asyncio(loop_scope="session")
async def test_in_defer_the_teachers_outputs_are_written_back_before_training(
    working: Working,
) -> None:
    """While the trainer is at work: taught, joined, published and committed, in that order."""
    world = ScriptedWorld()
    asked: list[b.WriteBackRequest] = []
    real = world.write_back_scores

    @activity.defn(name="write_back_scores")
    async def noted(request: b.WriteBackRequest) -> b.WriteBackResult:
        asked.append(request)
        world.log.append(("batch", "write back"))
        return await real(request)

    world.write_back_scores = noted  # type: ignore[method-assign]
    world.faults["train_step"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        (request,) = asked
        assert request.taught is not None
        seen = await lease(client, handle)
        assert seen.batch is not None
        assert seen.batch.state == "COMMITTED"
        assert world.partitions == {f"{handle.id}/train_1"}
        order = [each for each in world.log if each[0] in ("teacher", "batch", "trainer")]
        assert order[-6:] == [
            ("teacher", "onload"),
            ("teacher", "teach_samples"),
            ("teacher", "offload"),
            ("batch", "write back"),
            ("trainer", "onload"),
            ("trainer", "train 1"),
        ]
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def test_what_is_published_for_training_has_the_teachers_log_probs(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
) -> None:
    """Of every sampled token, from real staged files; without them nothing is written back."""
    generated = await staged(phase, upstream)
    upstream.output = YES
    verdicts = await judged(phase, upstream, generated)
    lessons = await taught(phase, upstream, generated)
    scored: pa.Table = store.read_table(joined(phase, generated, verdicts, lessons).staged)
    rows = rows_of_table(scored)
    lengths = [len(each) for each in scored.column("response_ids").to_pylist()]
    given = [len(each) for each in scored.column("teacher_log_probs").to_pylist()]
    assert given == lengths
    assert len(rows) == len(lengths)
    with pytest.raises(Exception, match="teacher"):
        joined(phase, generated, verdicts, None)
