"""Callers of a gateway that asks for tokens, or has a certificate of an authority of one's own."""

import asyncio
import json
import pickle
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_infer.discovery import (
    InferenceClient,
    close_loop_inference_clients,
    generate_with_discovery,
)
from relax_infer.discovery._loops import _clients
from relax_infer.gateway.serve import GatewayOptions, serve_file
from relax_infer.security import Callers, load_callers
from tests.discovery.servers import Provider, discovery, echo
from tests.gateway.fakes import engine, gateway, registry
from tests.security.certificates import make_certificates

TOKEN = "judge-token-0123456789abcdef"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def callers(folder: Path) -> Callers:
    """As a gateway knows them that has RELAX_GATEWAY_TOKENS."""
    file = folder / "callers.yaml"
    file.write_text(f"callers: {{box: {{token: {TOKEN}, roles: [genrm]}}}}")
    file.chmod(0o600)
    loaded = load_callers({"RELAX_GATEWAY_TOKENS": str(file)})
    assert loaded is not None
    return loaded


async def test_a_gateway_that_asks_for_tokens_is_read_and_asked_with_one(tmp_path: Path) -> None:
    async with gateway(callers=callers(tmp_path)) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        url = f"{front.url}/genrm"
        both: dict[str, Any] = {"discovery_url": url, "gateway_url": url}
        async with InferenceClient(**both) as client:
            with pytest.raises(aiohttp.ClientResponseError) as refused:
                await client.generate({"text": "x"}, headers=BEARER)
            assert refused.value.status == 401
        async with InferenceClient(**both, headers=BEARER) as client:
            assert (await client.snapshot())["role"] == "genrm"
            assert await client.generate({"text": "x"}) == {"text": "ok"}
            assert await client.chat({"messages": []}, headers={"x-request-id": "7"})
            assert [c async for c in client.stream("/generate", {"text": "x"})]
            wrong = {"Authorization": "Bearer another-0123456789abcdef"}
            with pytest.raises(aiohttp.ClientResponseError) as refused:
                await client.generate({"text": "x"}, headers=wrong)
            assert refused.value.status == 401
        assert len(upstream.posts) == 3
        assert upstream.posts[1][0]["x-request-id"] == "7"
        assert all("Authorization" not in seen for seen, _ in upstream.posts)


async def test_a_token_for_discovery_does_not_go_to_the_engines_that_it_names(
    tmp_path: Path,
) -> None:
    async with gateway(callers=callers(tmp_path)) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        headers = {"Authorization": f"Bearer {TOKEN}", "x-team": "a", "X-SMG-Routing-Key": "g"}
        async with InferenceClient(discovery_url=f"{front.url}/genrm", headers=headers) as client:
            await client.generate({"text": "x"})
            await client.generate({"text": "x"}, headers={"X-TEAM": "b", "authorization": "mine"})
        (first, _), (second, _) = upstream.posts
        assert "Authorization" not in first
        assert (first.getall("x-team"), first["X-SMG-Routing-Key"]) == (["a"], "g")
        assert (second.getall("x-team"), second["Authorization"]) == (["b"], "mine")
        # Who knows the engines itself means them.
        async with InferenceClient(snapshot_provider=Provider(upstream), headers=headers) as client:
            await client.generate({"text": "x"})
        assert upstream.posts[2][0]["Authorization"] == f"Bearer {TOKEN}"


async def test_no_error_shows_the_token_that_was_sent(tmp_path: Path) -> None:
    """Ray, logs and test runners show an error's repr, and pickles of it travel."""
    async with gateway(callers=callers(tmp_path)) as front:
        url = f"{front.url}/genrm"
        async with InferenceClient(discovery_url=url, headers=BEARER) as client:
            with pytest.raises(aiohttp.ClientResponseError) as refused:
                await client.generate({"text": "x"})
    assert refused.value.status == 503
    assert TOKEN not in repr(refused.value)
    assert TOKEN.encode() not in pickle.dumps(refused.value)


async def test_headers_of_another_request_that_are_passed_on_do_not_say_where_this_one_ends() -> (
    None
):
    foreign = {"Host": "other", "Content-Length": "3", "Connection": "close", "x-request-id": "7"}
    async with (
        engine(echo) as upstream,
        InferenceClient(
            snapshot_provider=Provider(upstream), headers={"transfer-encoding": "chunked"}
        ) as client,
    ):
        assert await client.generate({"text": "x"}, headers=foreign) == {"text": "ok"}
    ((sent, body),) = upstream.posts
    assert json.loads(body) == {"text": "x"}
    assert (sent["x-request-id"], sent["host"]) == ("7", upstream.url.removeprefix("http://"))


async def test_headers_leave_a_conditional_read_as_it_is() -> None:
    async with discovery() as role, engine(echo) as upstream:
        role.publish(upstream)
        headers = {"If-None-Match": "mine"}
        async with InferenceClient(
            discovery_url=role.role_url, headers=headers, cache_ttl=0
        ) as client:
            await client.snapshot()
            await client.snapshot()
        assert role.statuses == [200, 304]
        assert role.seen[0][1] is None


async def test_a_loop_has_one_client_for_each_set_of_headers_and_authority(tmp_path: Path) -> None:
    async with gateway(callers=callers(tmp_path)) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        url, body = f"{front.url}/genrm", {"text": "x"}
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            await generate_with_discovery(url, body, headers=BEARER)
        assert refused.value.status == 401
        for own in (BEARER, {"AUTHORIZATION": f"Bearer {TOKEN}"}):
            for n in range(3):
                answer = await generate_with_discovery(
                    url, body, headers={"x-request-id": str(n)}, client_headers=own
                )
                assert answer == {"text": "ok"}
        trusting = ssl.create_default_context()
        await generate_with_discovery(url, body, client_headers=BEARER, ssl=trusting)
        assert len(_clients[asyncio.get_running_loop()]) == 3
        await close_loop_inference_clients()


async def test_a_certificate_of_a_private_authority_is_trusted_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path)
    monkeypatch.setenv("RELAX_GATEWAY_TLS_CERT", str(made.certificate))
    monkeypatch.setenv("RELAX_GATEWAY_TLS_KEY", str(made.key))
    async with engine(echo) as upstream:
        file = tmp_path / "registry.json"
        file.write_text(json.dumps({"genrm": registry("genrm", upstream.url)}))
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve_file(
                host="127.0.0.1",
                port=0,
                registry=file,
                options=GatewayOptions(),
                listening=address.set_result,
            )
        )
        try:
            url = f"{await asyncio.wait_for(address, 30)}/genrm"
            trusting = ssl.create_default_context(cafile=str(made.authority))
            async with InferenceClient(discovery_url=url, gateway_url=url, ssl=trusting) as client:
                assert await client.generate({"text": "x"}) == {"text": "ok"}
            async with InferenceClient(discovery_url=url) as client:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await client.snapshot()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"headers": "Authorization"}, "headers must be a mapping, got str"),
        ({"headers": {"Authorization": None}}, "headers must map strings to strings"),
        ({"headers": {1: "a"}}, "headers must map strings to strings; 1 does not"),
        ({"ssl": True}, "ssl must be an ssl.SSLContext or None, got True"),
    ],
)
async def test_what_is_no_header_or_context_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        InferenceClient(discovery_url="http://127.0.0.1:1/genrm", **given)
