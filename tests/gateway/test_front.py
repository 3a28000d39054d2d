import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_infer.contracts.batch import Judging, RegistryPush
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import FrontAddress
from relax_infer.engines.host_processes import processes
from relax_infer.engines.router import RouterAdapter
from relax_infer.gateway.front import Front
from relax_infer.placement.facts import RouterFacts
from relax_infer.placement.run_actors import look_at_routers, recorded_routers
from tests.gateway.asking import ask
from tests.gateway.fakes import Engine, engine, registry, until
from tests.gateway.test_gateway import echo, post
from tests.gateway.test_judge import MESSAGES, PROMPT, TEMPLATE, save_tokenizer, yes

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
async def front(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Front]:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")  # nobody to pull from
    made = Front(request.node.name.removeprefix("test_")[:40])
    yield made
    await made.stop()


def push_of(
    front: Front, address: FrontAddress, *engines: Engine, term: int = 1, revision: int = 1
) -> RegistryPush:
    """Rollout through the router."""
    urls = [e.url for e in engines]
    routed = {"route_mode": "SGLANG_ROUTER", "router_url": address.router_url}
    return RegistryPush(
        run=RunRef(run=front.run, store="memory://"),
        role="rollout",
        term=term,
        document=registry("rollout", *urls, **routed) | {"topology_revision": revision},
        router_workers=tuple(urls),
    )


async def described(front: Front) -> dict[str, Any]:
    found = await front.describe()
    assert found is not None
    return found


def end(pid: int) -> None:
    """SIGKILL, as a crash would."""
    os.kill(pid, signal.SIGKILL)


async def gone(*pids: int) -> None:
    await until(lambda: not {row.stamp.pid for row in processes()} & set(pids))


async def generate(address: FrontAddress) -> int:
    return (await post(f"{address.gateway_url}/rollout/generate"))[0]


async def test_a_look_from_outside_finds_the_router_and_hears_that_it_answers(front: Front):
    address = await front.ensure()
    (router,) = [each for each in await look_at_routers() if each.run == front.run]
    described_as = await described(front)
    assert (router.url, router.pid) == (address.router_url, described_as["router_pid"])
    assert router.fault is None


async def test_the_router_of_a_front_that_is_gone_is_found_in_its_file_and_asked(front: Front):
    import ray

    address = await front.ensure()
    there = await described(front)
    cluster = ray.get_runtime_context().gcs_address

    async def look() -> RouterFacts:
        (found,) = await recorded_routers(cluster, [front.run, "nobody"], "127.0.0.1")
        return found

    end(there["actor_pid"])
    await gone(there["actor_pid"])
    assert await look() == RouterFacts(
        run=front.run, url=address.router_url, pid=there["router_pid"]
    )
    end(there["router_pid"])
    await gone(there["router_pid"])
    assert (await look()).fault == "its front is gone, and its process has ended"


async def workers(front: Front) -> set[str]:
    url = (await described(front))["router_url"]
    async with aiohttp.ClientSession() as session, session.get(f"{url}/workers") as answer:
        return {worker["url"] for worker in (await answer.json())["workers"]}


async def test_a_request_passes_gateway_router_and_engine_after_one_push(front: Front) -> None:
    address = await front.ensure()
    async with engine(echo) as first:
        push = push_of(front, address, first)
        assert (await front.push(push))["outcome"] == "accepted"
        assert await generate(address) == 200
        assert len(first.posts) == 1
        assert (await front.push(push))["outcome"] == "unchanged"
    before = await described(front)
    assert await front.ensure() == address
    assert await described(front) == before
    assert Path(before["logs"][0]).parts[:-2] == Path(os.environ["RELAX_HOME"]).parts


async def test_an_older_push_changes_neither_router_nor_gateway(front: Front) -> None:
    address = await front.ensure()
    async with engine(echo) as first, engine(echo) as second:
        await front.push(push_of(front, address, first, second, term=2, revision=3))
        late = await front.push(push_of(front, address, first, term=2, revision=2))
        assert late == {
            "outcome": "older",
            "held": {"term": 2, "topology_revision": 3, "registry_epoch": "epoch"},
        }
        assert await workers(front) == {first.url, second.url}
        with pytest.raises(PermanentError, match="conflict"):
            await front.push(push_of(front, address, second, term=2, revision=3))
        fewer = push_of(front, address, second, term=2, revision=4)
        assert (await front.push(fewer))["outcome"] == "accepted"
        assert await workers(front) == {second.url}


async def test_dead_children_are_started_again_on_their_ports(front: Front) -> None:
    address = await front.ensure()
    async with engine(echo) as first:
        push = push_of(front, address, first)
        await front.push(push)
        before = await described(front)
        end(before["gateway_pid"])
        end(before["router_pid"])
        await gone(before["gateway_pid"], before["router_pid"])
        assert await front.ensure() == address
        after = await described(front)
        assert after["gateway_pid"] != before["gateway_pid"]
        assert after["router_pid"] != before["router_pid"]
        assert await workers(front) == {first.url}  # remembered by the front
        assert await generate(address) == 503  # until a push or a pull
        assert (await front.push(push))["outcome"] == "accepted"
        assert await generate(address) == 200


async def test_an_older_push_does_not_win_because_the_gateway_was_started_again(
    front: Front,
) -> None:
    address = await front.ensure()
    async with engine(echo) as first, engine(echo) as second:
        await front.push(push_of(front, address, first, second, term=2, revision=3))
        before = await described(front)
        end(before["gateway_pid"])
        await gone(before["gateway_pid"])
        await crash_actor(before)
        late = await front.push(push_of(front, address, first, term=2, revision=2))
        assert late == {"outcome": "older", "held": {"term": 2, "topology_revision": 3}}
        assert await workers(front) == {first.url, second.url}
        assert await generate(address) == 503
        again = push_of(front, address, first, second, term=2, revision=3)
        assert (await front.push(again))["outcome"] == "accepted"
        assert await generate(address) == 200


async def test_a_run_of_another_stack_is_not_held_to_what_an_earlier_one_pushed(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_STACK", "first")
    address = await front.ensure()
    async with engine(echo) as first:
        await front.push(push_of(front, address, first, term=2, revision=3))
        await crash_actor(await described(front))
        monkeypatch.setenv("RELAX_STACK", "second")
        address = await front.ensure()
        assert (await front.push(push_of(front, address, first)))["outcome"] == "accepted"
        assert await generate(address) == 200


async def test_messages_are_judged_as_the_recipe_says_also_by_a_gateway_started_again(
    front: Front, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "judge", TEMPLATE)
    address = await front.ensure()
    judging = Judging(template_kwargs={"m": {"think": True}}, max_new_tokens=7)
    async with engine(yes) as upstream:
        upstream.info["tokenizer_path"] = str(tmp_path / "judge")
        push = RegistryPush(
            run=RunRef(run=front.run, store="memory://"),
            role="genrm",
            term=1,
            document=registry("genrm", upstream.url),
            judging=judging,
        )
        assert (await front.push(push))["outcome"] == "accepted"
        before = await described(front)
        assert await judged(address, upstream) == ([*PROMPT, 2], 7)
        end(before["gateway_pid"])
        await gone(before["gateway_pid"])
        assert (await front.push(push))["outcome"] == "accepted"
        assert await judged(address, upstream) == ([*PROMPT, 2], 7)
        await front.push(push.model_copy(update={"judging": Judging(max_new_tokens=9)}))
        assert await judged(address, upstream) == (PROMPT, 9)


async def judged(address: FrontAddress, upstream: Engine) -> tuple[list[int], int]:
    """Prompt and ``max_new_tokens`` of what the engine is asked for messages."""
    answer = await ask("POST", f"{address.gateway_url}/genrm/generate", {"messages": MESSAGES})
    assert answer.json == {"response": "yes"}
    sent = json.loads(upstream.posts[-1][1])
    return sent["input_ids"], sent["sampling_params"]["max_new_tokens"]


async def test_children_that_die_while_nobody_asks_are_started_again(front: Front) -> None:
    address = await front.ensure()
    async with engine(echo) as first:
        await front.push(push_of(front, address, first))
        before = await described(front)
        pids = {before["router_pid"], before["gateway_pid"]}
        for pid in pids:
            end(pid)
        after = before
        async with asyncio.timeout(60):
            while pids & {after["router_pid"], after["gateway_pid"]}:
                await asyncio.sleep(0.1)
                after = await described(front)  # asks for nothing
        assert await front.ensure() == address
        assert await workers(front) == {first.url}


async def test_a_worker_that_appears_when_nobody_waits_for_it_is_let_go(front: Front) -> None:
    address = await front.ensure()
    async with engine(echo) as first, engine(echo) as stray:
        await front.push(push_of(front, address, first))
        await RouterAdapter(address.router_url).set_workers([first.url, stray.url])
        async with asyncio.timeout(60):
            while await workers(front) != {first.url}:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def test_a_new_actor_adopts_what_runs_and_restarts_what_does_not(front: Front) -> None:
    """pains 11."""
    address = await front.ensure()
    async with engine(echo) as first:
        await front.push(push_of(front, address, first))
        before = await described(front)
        await crash_actor(before)
        assert await generate(address) == 200  # nobody noticed
        assert await front.ensure() == address
        after = await described(front)
        assert after.pop("actor_pid") != before.pop("actor_pid")
        assert after == before

        end(before["router_pid"])
        await crash_actor(await described(front))
        assert await front.ensure() == address
        after = await described(front)
        assert after["gateway_pid"] == before["gateway_pid"]
        assert after["router_pid"] != before["router_pid"]
        assert await workers(front) == {first.url}
        assert await generate(address) == 200


async def crash_actor(found: dict[str, Any]) -> None:
    end(found["actor_pid"])
    await gone(found["actor_pid"])


async def test_children_that_were_told_of_another_temporal_are_not_adopted(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = await front.ensure()
    before = await described(front)
    await crash_actor(before)
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:10")
    assert await front.ensure() == address
    assert (await described(front))["gateway_pid"] != before["gateway_pid"]
    await gone(before["gateway_pid"])


def left_files(found: dict[str, Any]) -> list[str]:
    return [found[name] for name in ("control_socket", "state_file") if Path(found[name]).exists()]


async def test_stop_leaves_nothing_and_may_be_repeated(front: Front) -> None:
    import ray

    await front.ensure()
    found = await described(front)
    await front.stop()
    await gone(found["router_pid"], found["gateway_pid"])
    assert left_files(found) == []
    with pytest.raises(ValueError, match="front"):
        ray.get_actor("front", namespace=f"relax-{front.run}")
    assert await front.describe() is None
    await front.stop()

    await front.ensure()
    orphans = await described(front)
    await crash_actor(orphans)
    await front.stop()
    await gone(orphans["router_pid"], orphans["gateway_pid"])
