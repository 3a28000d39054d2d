from typing import Any

import aiohttp
import pytest

from relax_infer.discovery import InferenceRegistry, RoutingSpec
from relax_infer.gateway import RegistryIntake, RegistryRefused
from tests.gateway.fakes import Gateway, gateway, registry


async def put(front: Gateway, role: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{front.control}/registry/{role}", json=body) as answer,
    ):
        return answer.status, await answer.json()


def at(revision: int, url: str = "http://engine:1") -> dict[str, Any]:
    return registry("genrm", url) | {"topology_revision": revision}


async def test_newer_documents_are_taken_and_older_ones_refused() -> None:
    async with gateway() as front:

        async def push(term: int, document: dict[str, Any]) -> tuple[int, str]:
            status, answer = await put(front, "genrm", {"term": term, "document": document})
            return status, answer["outcome"]

        assert await push(1, at(5)) == (200, "accepted")
        assert await push(1, at(5)) == (200, "unchanged")
        assert await push(1, at(5, "http://other:1")) == (409, "conflict")
        assert await push(1, at(4)) == (409, "older")
        assert await push(1, at(6)) == (200, "accepted")
        assert await push(2, at(0)) == (200, "accepted")  # a new registry starts at zero
        assert await push(1, at(9)) == (409, "older")
        held = front.intake.get("genrm")
        assert held is not None
        assert held.order == (2, 0)


async def test_what_is_no_registry_of_that_role_changes_nothing() -> None:
    async with gateway() as front:
        good = at(1)
        await put(front, "genrm", {"term": 1, "document": good})
        for body in (
            None,
            [],
            {"term": 2},
            {"term": 2, "document": {}},
            {"term": True, "document": good},
            {"term": -1, "document": good},
            {"term": "2", "document": good},
            {"term": 2, "document": good, "more": 1},
            {"term": 2, "document": registry("teacher", "http://engine:1")},
        ):
            assert (await put(front, "genrm", body))[0] == 400
        assert (await put(front, "worker", {"term": 2, "document": good}))[0] == 404
        held = front.intake.get("genrm")
        assert held is not None
        assert held.order == (1, 1)


@pytest.mark.parametrize(("term", "revision"), [(2**62, 1), (1, 2**62), (1, 10**400)])
async def test_an_order_that_nothing_gets_to_does_not_lock_out_what_follows(
    term: int, revision: int
) -> None:
    async with gateway() as front, aiohttp.ClientSession() as session:
        status, told = await put(front, "genrm", {"term": term, "document": at(revision)})
        assert status == 400
        assert "9007199254740991" in told["detail"]
        assert (await put(front, "genrm", {"term": 1, "document": at(1)}))[0] == 200
        async with session.get(f"{front.url}/metrics") as answer:
            assert answer.status == 200


async def test_the_control_app_shows_what_is_held() -> None:
    async with gateway() as front, aiohttp.ClientSession() as session:
        await put(front, "genrm", {"term": 3, "document": at(2)})
        async with session.get(f"{front.control}/registry") as answer:
            assert await answer.json() == {
                "genrm": {
                    "term": 3,
                    "topology_revision": 2,
                    "registry_epoch": "epoch",
                    "document": at(2),
                }
            }
        async with session.post(f"{front.control}/registry/genrm", json={}) as answer:
            assert answer.status == 405


def test_a_refusal_names_both_orders() -> None:
    intake, own = RegistryIntake(), InferenceRegistry("rollout", "e")
    intake.offer("rollout", 2, own.publish([], RoutingSpec(policy_revision=1)))
    with pytest.raises(RegistryRefused, match=r"\(1, 1\) is refused: older, held \(2, 1\)"):
        intake.offer("rollout", 1, own.snapshot())


async def test_an_older_push_is_logged_and_what_is_served_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A publisher that starts again lower does not bring an old registry back (pain 22)."""
    async with gateway() as front:
        await put(front, "genrm", {"term": 2, "document": at(5)})
        with caplog.at_level("WARNING", logger="relax_infer.gateway.control"):
            status, _ = await put(front, "genrm", {"term": 1, "document": at(9, "http://old:1")})
        assert status == 409
        assert "(1, 9) is refused: older, held (2, 5)" in caplog.text
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{front.url}/genrm/engines") as answer,
        ):
            assert await answer.json() == at(5)
