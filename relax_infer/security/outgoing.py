"""What a run's own parts need to call its gateway: a token and a certificate to trust."""

import os
import ssl
from collections.abc import Mapping
from functools import cache

from relax_infer.contracts.failures import PermanentError
from relax_infer.security.callers import OWN
from relax_infer.security.secret_files import secret

CA = "RELAX_GATEWAY_TLS_CA"


def gateway_headers(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The run's own token; nothing where the gateway asks for none."""
    token = secret(OWN, variables)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def gateway_ssl() -> ssl.SSLContext | bool:
    """For aiohttp's ``ssl``: the certificates of RELAX_GATEWAY_TLS_CA, else the system's.

    Raises:
        PermanentError: they cannot be read.
    """
    path = os.environ.get(CA, "")
    return _trusting(path) if path else True


@cache
def _trusting(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise PermanentError(
            f"{path} ({CA}) is no file of certificates: {error}.", cure=f"Correct {CA}."
        ) from error
