"""The gateway's certificate: RELAX_GATEWAY_TLS_CERT and RELAX_GATEWAY_TLS_KEY, files in PEM."""

import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from relax_infer.contracts.failures import PermanentError

CERT, KEY = "RELAX_GATEWAY_TLS_CERT", "RELAX_GATEWAY_TLS_KEY"


@dataclass(frozen=True)
class Tls:
    """Where certificate and key are."""

    certificate: str
    key: str


def tls_of(variables: Mapping[str, str] | None = None) -> Tls | None:
    """What the environment names; None: the gateway speaks plain HTTP.

    Raises:
        PermanentError: only one of the two is named, or they cannot be used.
    """
    given = os.environ if variables is None else variables
    certificate, key = given.get(CERT, ""), given.get(KEY, "")
    if not certificate and not key:
        return None
    if not (certificate and key):
        raise PermanentError(
            f"{CERT if certificate else KEY} is set, {KEY if certificate else CERT} is not.",
            cure="TLS needs both; set both, or neither.",
        )
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise PermanentError(
            f"{certificate} and {key} are no certificate and its key: {error}.",
            cure=f"Correct {CERT} and {KEY}.",
        ) from error
    return Tls(certificate, key)


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
