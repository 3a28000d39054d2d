"""Generation, judging, teaching and evaluation: the phases that ask engines."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import activity

from activities._progress import teller
from activities._run_files import recipe_of, store_of, task_of
from relax_infer.contracts.batch import EvaluateRequest, PhaseRequest, PhaseResult
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.run import Evaluation
from relax_infer.engines import EngineGroup
from relax_infer.machines import ReplicaState
from relax_infer.samples import evaluate, generate
from relax_infer.scoring import score_with_genrm, score_with_teacher


@activity.defn
async def generate_groups(request: PhaseRequest) -> PhaseResult:
    """Groups of samples from the policy, through the router, into staging."""
    return await generate(
        **await _common(request),
        router_url=request.front.router_url,
        addresses=lambda: _addresses(request.groups),
    )


@activity.defn
async def judge_samples(request: PhaseRequest) -> PhaseResult:
    """The GenRM's verdicts on the generated samples, through the gateway."""
    assert request.source is not None
    return await score_with_genrm(
        **await _common(request),
        source=request.source,
        gateway_url=request.front.gateway_url,
        judges=_judges(request),
    )


@activity.defn
async def teach_samples(request: PhaseRequest) -> PhaseResult:
    """The Teacher's log-probs of the sampled tokens, through the gateway."""
    assert request.source is not None
    return await score_with_teacher(
        **await _common(request), source=request.source, gateway_url=request.front.gateway_url
    )


@activity.defn
async def evaluate_policy(request: EvaluateRequest) -> Evaluation:
    """Greedy accuracy on the held-out problems, with pinned weights."""
    return await evaluate(**await _common(request), router_url=request.front.router_url)


def _judges(request: PhaseRequest) -> dict[str, str]:
    """Folder of each judge's tokenizer; of one that somebody else serves, as the recipe says."""
    genrm = recipe_of(request.run).genrm
    if genrm is not None and genrm.url is not None:
        return {genrm.model_id: genrm.model}
    return {group.model: group.model_path for group in request.groups}


async def _common(request: PhaseRequest | EvaluateRequest) -> dict[str, Any]:
    return {
        "store": store_of(request.run),
        "step": request.step,
        "task": await asyncio.to_thread(task_of, request.run),  # may import and make problems
        "recipe": recipe_of(request.run),
        "weight_version": request.weight_version,
        "settle": _settler(request.groups),
        "beat": _counting(),
    }


async def _addresses(groups: tuple[EngineGroupSpec, ...]) -> list[str]:
    """Of the replicas that answer."""
    described = await asyncio.gather(*(EngineGroup(group).describe() for group in groups))
    ready = [e for each in described for e in each if e.state is ReplicaState.READY]
    return sorted(e.base_url for e in ready if e.base_url is not None)


def _counting() -> Callable[[int, int], None]:
    """How many groups are done, for whoever looks at the step."""
    tell = teller()
    return lambda done, groups: tell(f"{done} of {groups} groups")


def _settler(groups: tuple[EngineGroupSpec, ...]) -> Callable[[str], Awaitable[int]]:
    """Abort what earlier attempts may have left in flight, and see it gone, on every engine."""

    async def settle(prefix: str) -> int:
        return sum([await EngineGroup(group).settle_requests(prefix) for group in groups])

    return settle


ACTIVITIES = (generate_groups, judge_samples, teach_samples, evaluate_policy)
