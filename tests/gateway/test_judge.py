"""Contract 4.2 and 4.8: messages for a judge, by the model's own chat template."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relax_infer.contracts.failures import PermanentError
from relax_infer.discovery import InferenceRegistry, ModelSnapshot, ReplicaSnapshot, RoutingSpec
from relax_infer.gateway.judge import ChatTemplates
from relax_infer.gateway.serve import GatewayOptions, serve_gateway
from tests.gateway.asking import Reply, ask
from tests.gateway.fakes import Gateway, engine, free_port, gateway, registry, until

MESSAGES = [{"role": "user", "content": "is 4 even ?"}]
WORDS = ("<u>", "<a>", "<think>", "is", "4", "even", "?")
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
    "{% for m in messages %}<{{ m.role[0] }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<a>{% if think %} <think>{% endif %}{% endif %}"
)
PROMPT = [0, 3, 4, 5, 6, 1]
"""``<u> is 4 even ? <a>``"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer, as Hugging Face saves it."""
    made = tmp_path_factory.mktemp("judge")
    save_tokenizer(made, TEMPLATE)
    return made


def save_tokenizer(folder: Path, template: str | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


async def yes(request: web.Request, payload: dict[str, Any]) -> web.Response:
    return web.json_response({"text": "  yes\n", "meta_info": {"finish_reason": {"type": "stop"}}})


async def judge(front: Gateway, payload: Any = None, **more: Any) -> Reply:
    sent = {"messages": MESSAGES, **more} if payload is None else payload
    return await ask("POST", f"{front.url}/genrm/generate", sent)


async def test_messages_go_out_as_token_ids_and_the_text_comes_back_alone(folder: Path) -> None:
    async with gateway(genrm_render=ChatTemplates({"m": folder})) as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        answer = await judge(front, route_key="k")
        assert (answer.status, answer.json) == (200, {"response": "yes"})
        assert answer.headers["Content-Type"] == "application/json"
        await judge(front, sampling_params={"temperature": 0, "stop": ["."]}, rid="mine")
        await judge(front, sampling_params=None)
    first, second, third = (json.loads(raw) for _, raw in upstream.posts)
    defaults = {"temperature": 0.2, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1024}
    assert first.pop("rid").startswith("judge-")
    assert first == {"input_ids": PROMPT, "sampling_params": defaults}
    assert second["rid"] == "mine"
    assert second["sampling_params"] == defaults | {"temperature": 0, "stop": ["."]}
    assert third["sampling_params"] == defaults


async def test_the_template_is_given_what_the_instance_asks_for(folder: Path) -> None:
    templates = ChatTemplates(
        {"m": folder}, template_kwargs={"m": {"think": True}}, max_new_tokens=7
    )
    async with gateway(genrm_render=templates) as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        await judge(front)
    sent = json.loads(upstream.posts[0][1])
    assert sent["input_ids"] == [*PROMPT, 2]
    assert sent["sampling_params"]["max_new_tokens"] == 7


async def test_how_messages_are_judged_is_told_on_the_control_socket(
    folder: Path, tmp_path: Path
) -> None:
    port, control = free_port(), tmp_path / "gw"
    options = GatewayOptions(tokenizers={"m": str(folder)})
    serving = asyncio.create_task(
        serve_gateway(host="127.0.0.1", port=port, control_socket=control, options=options)
    )
    await until(control.exists)
    async with (
        engine(yes) as upstream,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(control))) as session,
    ):

        async def put(path: str, body: Any) -> int:
            async with session.put(f"http://gateway{path}", json=body) as answer:
                return answer.status

        document = registry("genrm", upstream.url)
        assert await put("/registry/genrm", {"term": 1, "document": document}) == 200
        for told, prompt, tokens in (
            ({"template_kwargs": {"m": {"think": True}}, "max_new_tokens": 7}, [*PROMPT, 2], 7),
            ({"template_kwargs": {"other": {"think": True}}}, PROMPT, 1024),
        ):
            assert await put("/judging", told) == 200
            assert await put("/judging", {"max_new_tokens": 0}) == 400
            url = f"http://127.0.0.1:{port}/genrm/generate"
            await ask("POST", url, {"messages": MESSAGES})
            sent = json.loads(upstream.posts[-1][1])
            assert sent["input_ids"] == prompt
            assert sent["sampling_params"]["max_new_tokens"] == tokens
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_without_a_folder_the_engine_is_asked_where_its_tokenizer_is(folder: Path) -> None:
    from relax_infer.gateway import serve
    from relax_infer.gateway._upstream import Upstream

    async with gateway() as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        connections = Upstream(8)
        locate = serve._engine_tokenizer(front.intake, connections)
        assert await locate("nobody") is None
        upstream.info = {"tokenizer_path": str(folder)}
        templates = ChatTemplates(locate=locate)
        for _ in range(2):
            payload = await templates("m", MESSAGES, None)
            assert payload["input_ids"] == PROMPT
        await connections.close()
        assert upstream.gets == ["/model_info"]


@pytest.mark.parametrize("info", [{}, {"tokenizer_path": "org/on-the-hub"}])
async def test_a_tokenizer_that_is_not_here_is_named_with_the_cure(info: dict[str, str]) -> None:
    async def locate(model: str) -> str | None:
        return info.get("tokenizer_path")

    async with gateway(genrm_render=ChatTemplates(locate=locate)) as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        answer = await judge(front)
    assert (answer.status, upstream.posts) == (400, [])
    assert "--genrm-tokenizer m=FOLDER" in answer.detail


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"messages": "x"}, "list of objects"),
        ({"messages": ["x"]}, "list of objects"),
        ({"messages": None}, "list of objects"),
        ({"messages": MESSAGES, "stream": True}, "stream"),
        ({"messages": MESSAGES, "sampling_params": []}, "sampling_params"),
        ({"messages": MESSAGES, "text": "x"}, "not both"),
        ({"messages": MESSAGES, "input_ids": [1]}, "not both"),
        ({"messages": []}, "refuses these messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no system turn here"),
        (b'{"messages": [{"a": "\\ud800"}]}', "not JSON"),
        (b'{"messages": [{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}]}", "JSON"),
        (b'{"messages": [], "sampling_params": {"temperature": 1e999}}', "sampling_params"),
    ],
)
async def test_messages_that_cannot_be_used_are_400_and_reach_no_engine(
    folder: Path, payload: Any, says: str
) -> None:
    async with gateway(genrm_render=ChatTemplates({"m": folder})) as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        answer = await judge(front, payload)
    assert (answer.status, says in answer.detail) == (400, True), answer.detail
    assert upstream.posts == []


@pytest.mark.parametrize("role", ["rollout", "teacher", "genrm"])
async def test_messages_are_refused_by_other_roles_and_without_a_renderer(
    folder: Path, role: str
) -> None:
    options = {} if role == "genrm" else {"genrm_render": ChatTemplates({"m": folder})}
    async with gateway(**options) as front, engine(yes) as upstream:
        front.publish(role, upstream.url)
        answer = await ask("POST", f"{front.url}/{role}/generate", {"messages": MESSAGES})
    assert (answer.status, upstream.posts) == (400, [])


class Slow:
    """A renderer that waits to be told."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, model: str, messages: Any, parameters: Any) -> dict[str, Any]:
        self.begun.set()
        await self.go.wait()
        return {"input_ids": [1], "sampling_params": {}}


async def test_a_model_that_went_to_sleep_while_rendering_is_503_and_is_not_asked() -> None:
    render = Slow()
    async with gateway(genrm_render=render) as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        asked = asyncio.create_task(judge(front))
        await render.begun.wait()
        front.publish("genrm", upstream.url, term=2, state="SLEEPING")
        render.go.set()
        answer = await asked
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert upstream.posts == []


async def test_a_replica_that_moved_while_rendering_is_asked_where_it_is_now() -> None:
    render = Slow()
    async with gateway(genrm_render=render) as front, engine(yes) as old, engine(yes) as new:
        front.publish("genrm", old.url)
        asked = asyncio.create_task(judge(front))
        await render.begun.wait()
        front.publish("genrm", new.url, term=2)
        render.go.set()
        assert (await asked).status == 200
    assert (len(old.posts), len(new.posts)) == (0, 1)


async def test_rendering_counts_against_the_deadline() -> None:
    async with gateway(genrm_render=Slow(), timeout=0.2) as front, engine(yes) as upstream:
        front.publish("genrm", upstream.url)
        assert (await judge(front)).status == 504
    assert upstream.posts == []


async def test_messages_take_turns_among_all_replicas(folder: Path) -> None:
    """Reading discovery twice must not pass every other replica over."""
    render = ChatTemplates({"m": folder})
    async with gateway(genrm_render=render) as front, engine(yes) as first, engine(yes) as second:
        front.publish("genrm", first.url, second.url)
        for _ in range(4):
            await judge(front)
        assert (len(first.posts), len(second.posts)) == (2, 2)


async def test_messages_that_name_no_model_go_to_the_only_one_or_to_the_default_key(
    folder: Path,
) -> None:
    render = ChatTemplates({"m": folder, "n": folder})
    async with gateway(genrm_render=render) as front, engine(yes) as upstream:

        def publish(term: int, names: str, keys: dict[str, str]) -> None:
            models = [
                ModelSnapshot(
                    model_id=name,
                    state="READY",
                    route_mode="DIRECT",
                    engines=[
                        ReplicaSnapshot(
                            engine_id=name,
                            base_url=upstream.url,
                            state="READY",
                            direct_eligible=True,
                        )
                    ],
                )
                for name in names
            ]
            document = InferenceRegistry("genrm", str(term)).publish(
                models, RoutingSpec(route_key_map=keys)
            )
            front.intake.offer("genrm", term, document)

        publish(1, "m", {})
        assert (await judge(front)).status == 200
        publish(2, "mn", {})
        refused = await judge(front)
        assert (refused.status, "__default__" in refused.detail) == (400, True)
        publish(3, "mn", {"__default__": "n"})
        assert (await judge(front)).status == 200
        assert (await judge(front, model="m")).status == 200


@pytest.mark.parametrize(
    ("answered", "status"),
    [
        ({"text": "ye", "meta_info": {"finish_reason": {"type": "abort"}}}, 503),
        ({"output_ids": [1]}, 502),
        ({"text": None}, 502),
        ([{"text": "yes"}], 502),
    ],
)
async def test_a_part_of_a_verdict_is_no_verdict(folder: Path, answered: Any, status: int) -> None:
    """Pains 9 and 10: a judge that was stopped, or said nothing, gives no score."""

    async def part(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.json_response(answered)

    async with gateway(genrm_render=ChatTemplates({"m": folder})) as front, engine(part) as judged:
        front.publish("genrm", judged.url)
        answer = await judge(front)
    assert answer.status == status
    assert len(judged.posts) == 1


async def test_a_judge_whose_caller_leaves_is_aborted_under_the_id_that_it_was_given(
    folder: Path,
) -> None:
    async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with gateway(genrm_render=ChatTemplates({"m": folder})) as front, engine(never) as judged:
        front.publish("genrm", judged.url)
        async with aiohttp.ClientSession() as session:
            url = f"{front.url}/genrm/generate"
            asked = asyncio.create_task(session.post(url, json={"messages": MESSAGES}))
            await judged.seen.wait()
            asked.cancel()
        rid = json.loads(judged.posts[0][1])["rid"]
        await until(lambda: judged.aborts == [rid])


def test_a_folder_without_a_template_or_a_tokenizer_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="is no folder"):
        ChatTemplates({"m": tmp_path / "none"}).load()
    with pytest.raises(PermanentError, match=r"tokenizer of m cannot be read.*tokenizer\.json"):
        ChatTemplates({"m": tmp_path}).load()
    save_tokenizer(tmp_path, None)
    with pytest.raises(PermanentError, match="no chat template"):
        ChatTemplates({"m": tmp_path}).load()
