"""TLS of the gateway and towards Temporal."""

import asyncio
import json
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from temporalio.envconfig import ClientConfig

from relax_infer.contracts.failures import PermanentError
from relax_infer.gateway.serve import GatewayOptions, serve_file
from relax_infer.gateway.tls import tls_of
from relax_infer.security import gateway_ssl
from tests.gateway.fakes import registry
from tests.security.certificates import make_certificates


async def test_a_gateway_with_a_certificate_speaks_tls_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = make_certificates(tmp_path)
    certificate, key = made.certificate, made.key
    (tmp_path / "registry.json").write_text(json.dumps({"genrm": registry("genrm")}))
    monkeypatch.setenv("RELAX_GATEWAY_TLS_CERT", str(certificate))
    monkeypatch.setenv("RELAX_GATEWAY_TLS_KEY", str(key))
    monkeypatch.setenv("RELAX_GATEWAY_TLS_CA", str(made.authority))
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_file(
            host="127.0.0.1",
            port=0,
            registry=tmp_path / "registry.json",
            options=GatewayOptions(),
            listening=address.set_result,
        )
    )
    try:
        url = await asyncio.wait_for(address, 30)
        assert url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/healthz", ssl=gateway_ssl()) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"{url}/healthz")
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{url.replace('https', 'http')}/healthz")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_half_of_a_certificate_is_refused(tmp_path: Path):
    certificate = make_certificates(tmp_path).certificate
    with pytest.raises(PermanentError, match="RELAX_GATEWAY_TLS_KEY is not"):
        tls_of({"RELAX_GATEWAY_TLS_CERT": str(certificate)})
    given = {"RELAX_GATEWAY_TLS_CERT": str(certificate), "RELAX_GATEWAY_TLS_KEY": str(certificate)}
    with pytest.raises(PermanentError, match="no certificate and its key"):
        tls_of(given)
    assert tls_of({}) is None


def test_the_standard_variables_turn_tls_on_towards_temporal(tmp_path: Path):
    made = make_certificates(tmp_path)
    certificate, key = made.certificate, made.key
    config = ClientConfig.load_client_connect_config(
        override_env_vars={
            "TEMPORAL_ADDRESS": "temporal.example.com:7233",
            "TEMPORAL_TLS": "true",
            "TEMPORAL_TLS_SERVER_CA_CERT_PATH": str(made.authority),
            "TEMPORAL_TLS_CLIENT_CERT_PATH": str(certificate),
            "TEMPORAL_TLS_CLIENT_KEY_PATH": str(key),
            "TEMPORAL_TLS_SERVER_NAME": "temporal.internal",
        },
        disable_file=True,
    )
    tls = config["tls"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
    assert not isinstance(tls, bool)
    assert tls is not None
    assert tls.server_root_ca_cert == made.authority.read_bytes()
    assert (tls.client_cert, tls.client_private_key) == (certificate.read_bytes(), key.read_bytes())
    assert tls.domain == "temporal.internal"


async def test_a_worker_talks_tls_to_a_temporal_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first bytes that a server sees are a TLS handshake with the name that was asked for."""
    from workers.worker import connect

    made = make_certificates(tmp_path)
    certificate, key = made.certificate, made.key
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(made.authority))
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for name, value in {
        "TEMPORAL_ADDRESS": f"127.0.0.1:{port}",
        "TEMPORAL_TLS": "true",
        "TEMPORAL_TLS_SERVER_CA_CERT_PATH": str(made.authority),
        "TEMPORAL_TLS_CLIENT_CERT_PATH": str(certificate),
        "TEMPORAL_TLS_CLIENT_KEY_PATH": str(key),
        "TEMPORAL_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    connecting = asyncio.ensure_future(connect())
    try:
        assert await asyncio.to_thread(protocol_of_first_caller, listener, context) == "h2"
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)


def protocol_of_first_caller(listener: socket.socket, context: ssl.SSLContext) -> str | None:
    """What is agreed on in its handshake; everybody is hung up on then."""
    with listener:
        listener.settimeout(60)
        caller, _ = listener.accept()
    caller.settimeout(60)
    with context.wrap_socket(caller, server_side=True) as shaken:
        return shaken.selected_alpn_protocol()
