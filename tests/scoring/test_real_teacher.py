"""The four token modes against a real SGLang engine and transformers: the rows are of the tokens
that the contract says, and their log-probs are right. tests/scoring/models.py answers alike."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from relax_infer.config import load_recipe
from relax_infer.contracts.refs import RunRef
from relax_infer.engines.command import CPU_SHIM
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
    found: list[tuple[str, Sample]] = []
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
        found += [(mode, sample) for sample in from_table(store.read_table(made.staged))]
    rows = await asyncio.to_thread(
        _log_softmax,
        str(engine.folder / "version-0"),
        [[*sample.prompt_ids, *sample.response_ids] for _, sample in found],
    )
    compared = sum(_agree(s, r) for (_, s), r in zip(found, rows, strict=True))
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


_REFERENCE = """
import json, sys, torch
from transformers import Qwen3ForCausalLM
model = Qwen3ForCausalLM.from_pretrained(sys.argv[1]).float()
with torch.no_grad():
    rows = [torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1).tolist()
            for ids in json.load(sys.stdin)]
print(json.dumps(rows))
"""


def _log_softmax(folder: str, sequences: list[list[int]]) -> list[Any]:
    """Of each sequence [tokens, vocabulary], by transformers. It needs the shim on its path."""
    done = subprocess.run(
        (sys.executable, "-W", "ignore", "-c", _REFERENCE, folder),
        input=json.dumps(sequences),
        env={"PYTHONPATH": str(CPU_SHIM), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _agree(sample: Sample, of_all: Any) -> int:
    """How many log-probs were compared."""
    rows = np.array(of_all)[len(sample.prompt_ids) - 1 : -1]
    assert sample.teacher_log_probs is not None
    assert sample.opd_topk_token_ids is not None
    assert sample.opd_topk_teacher_log_probs is not None
    compared = 0
    for n, token in enumerate(sample.response_ids):
        assert sample.teacher_log_probs[n] == pytest.approx(rows[n, token], abs=TOLERANCE)
        wanted = sample.opd_topk_token_ids[n]
        given = sample.opd_topk_teacher_log_probs[n]
        assert given == pytest.approx(rows[n, list(wanted)].tolist(), abs=TOLERANCE)
        others = [token for token in range(rows.shape[1]) if token not in wanted]
        assert rows[n, others].max() <= min(given) + TOLERANCE or len(wanted) > K, "the likeliest"
        compared += 1 + len(wanted)
    return compared
