"""Tokens, certificates and keys: where they come from, and what they are checked against.

:mod:`relax_infer.security.codec` is imported by name: it needs Temporal's package.
"""

from relax_infer.security.callers import Caller, Callers, Refused, load_callers
from relax_infer.security.outgoing import gateway_headers, gateway_ssl
from relax_infer.security.secret_files import read_private, secret

__all__ = [
    "Caller",
    "Callers",
    "Refused",
    "gateway_headers",
    "gateway_ssl",
    "load_callers",
    "read_private",
    "secret",
]
