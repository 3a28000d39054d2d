"""The four token modes against a real SGLang engine and transformers: the rows are of the tokens
that the contract says, and their log-probs are right. tests/scoring/models.py answers alike."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from relax_infer.config import load_recipe
from relax_infer.contracts.refs import RunRef
from relax_infer.samples import Sample, StagingStore, from_table, generate, load_task
from relax_infer.scoring import score_with_teacher, write_back
from tests.engines.test_real_engine import RealEngine, engine

__all__ = ["engine"]

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

K = 4
TOLERANCE = 1e-4
"""Both compute in float32."""


async def settle(prefix: str) -> int:
    return 0


async def test_every_mode_agrees_with_transformers(
    engine: RealEngine, tmp_path_factory: pytest.TempPathFactory
):
    url = await engine.ready(0)
    model = AutoModelForCausalLM.from_pretrained(engine.folder / "version-0").float()
    compared = 0
    for mode in ("student_topk", "teacher_topk", "union"):
        recipe = load_recipe(
            "quickstart",
            {
                "rollout.prompts_per_step": 3,
                "rollout.samples_per_prompt": 2,
                "rollout.sampling.max_new_tokens": 6,
                "teacher.max_logprob_cells": 5 * K,
                "distillation.mode": mode,
                "distillation.top_k": K,
                "reward.source": "random",
            },
        )
        store = StagingStore(RunRef(run="real", store=tmp_path_factory.mktemp(mode).as_uri()))
        phase: dict[str, Any] = {
            "store": store,
            "step": 1,
            "task": load_task(recipe),
            "recipe": recipe,
            "weight_version": 0,
            "settle": settle,
            "beat": lambda done, total: None,
        }
        source = (await generate(**phase, router_url=url)).staged
        gateway = url  # the engine's own route, without the gateway's prefix
        lessons = await _taught(phase, source, gateway)
        made = await asyncio.to_thread(
            write_back,
            store,
            1,
            generated=source,
            judged=None,
            taught=lessons,
            task=phase["task"],
            recipe=recipe,
        )
        for sample in from_table(store.read_table(made.staged)):
            compared += _agree(sample, mode, model)
    assert compared > 100


async def _taught(phase: dict[str, Any], source: Any, url: str) -> Any:
    """Through a pass-through at ``/teacher``, as the gateway is."""
    from aiohttp import ClientSession, web

    async with ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            payload = await request.json()
            payload.pop("model")
            async with session.post(f"{url}/generate", json=payload) as response:
                return web.Response(
                    status=response.status,
                    body=await response.read(),
                    content_type="application/json",
                )

        app = web.Application()
        app.router.add_post("/teacher/generate", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            there = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return (await score_with_teacher(**phase, source=source, gateway_url=there)).staged
        finally:
            await runner.cleanup()


def _agree(sample: Sample, mode: str, model: Any) -> int:
    """How many log-probs were compared."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    rows = rows[len(sample.prompt_ids) - 1 : -1]
    assert sample.teacher_log_probs is not None
    assert sample.opd_topk_token_ids is not None
    assert sample.opd_topk_teacher_log_probs is not None
    compared = 0
    for n, token in enumerate(sample.response_ids):
        assert sample.teacher_log_probs[n] == pytest.approx(rows[n, token].item(), abs=TOLERANCE)
        wanted = sample.opd_topk_token_ids[n]
        given = sample.opd_topk_teacher_log_probs[n]
        assert given == pytest.approx(rows[n, list(wanted)].tolist(), abs=TOLERANCE)
        least = min(given)
        others = [token for token in range(rows.shape[1]) if token not in wanted]
        assert rows[n, others].max() <= least + TOLERANCE, "the likeliest are among them"
        compared += 1 + len(wanted)
    return compared
