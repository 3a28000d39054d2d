"""Who may call the gateway, which roles, how often and how much at once.

Pure but for :func:`load_callers`: the clock is given. Nothing is kept of a token but its SHA-256.
"""

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from relax_infer.contracts.base import StartInput
from relax_infer.contracts.failures import PermanentError
from relax_infer.security.secret_files import read_private, secret
from relax_infer.telemetry import remember_secret

FILE, OWN = "RELAX_GATEWAY_TOKENS", "RELAX_GATEWAY_TOKEN"
SHORTEST = 16
"""Characters of a token, at least."""

Refusal = Literal["no_token", "unknown_token", "role", "rate", "concurrency"]
_STATUS: dict[Refusal, int] = {
    "no_token": 401,
    "unknown_token": 401,
    "role": 403,
    "rate": 429,
    "concurrency": 429,
}


class CallerEntry(StartInput):
    """One caller in the file of callers."""

    token: str | None = Field(default=None, min_length=SHORTEST)
    token_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Instead of the token, so that the file holds no secret."""
    roles: tuple[Literal["rollout", "genrm", "teacher"], ...] = ("rollout", "genrm", "teacher")
    requests_per_second: float | None = Field(default=None, gt=0)
    """None: as many as it likes."""
    burst: int | None = Field(default=None, ge=1)
    """Requests at once before the rate counts; None: those of one second."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests under way at once."""

    @model_validator(mode="after")
    def _one_of_two(self) -> "CallerEntry":
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("give either token or token_sha256")
        return self


class CallersFile(StartInput):
    """The file that RELAX_GATEWAY_TOKENS names."""

    callers: dict[str, CallerEntry] = Field(min_length=1)


@dataclass
class Caller:
    """One caller and what it uses at the moment."""

    name: str
    digest: bytes
    roles: frozenset[str]
    rate: float | None = None
    burst: int = 1
    concurrency: int | None = None
    in_flight: int = field(default=0, init=False)
    _tokens: float = field(default=0.0, init=False)
    _at: float | None = field(default=None, init=False)

    def wait(self, now: float) -> float:
        """Seconds until another request is within the rate; 0: this one is, and is counted."""
        if self.rate is None:
            return 0.0
        passed = math.inf if self._at is None else now - self._at
        self._tokens = min(float(self.burst), self._tokens + passed * self.rate)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self.rate
        self._tokens -= 1
        return 0.0


class Refused(Exception):
    """The request may not be answered."""

    def __init__(self, reason: Refusal, caller: str = "", wait: float = 0.0) -> None:
        self.reason, self.caller = reason, caller
        self.status = _STATUS[reason]
        self.retry_after = max(1, math.ceil(wait)) if self.status == 429 else None
        super().__init__(reason)


class Callers:
    """Whom the gateway knows."""

    def __init__(
        self, callers: Iterable[Caller], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._callers = tuple(callers)
        self._clock = clock

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(caller.name for caller in self._callers)

    def known(self, authorization: bytes | None) -> Caller:
        """Whose token an Authorization header has. Every token is compared with, in a time that
        does not depend on where they differ.

        Raises:
            Refused: no token, or nobody's.
        """
        scheme, _, token = (authorization or b"").strip().partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise Refused("no_token")
        digest = hashlib.sha256(token.strip()).digest()
        found: Caller | None = None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is None:
            raise Refused("unknown_token")
        return found

    def begin(self, authorization: bytes | None, role: str) -> Caller:
        """Admit a request to ``role``; :meth:`end` gives its place back.

        Raises:
            Refused: who asks is not known, may not ask this role, or asks too much.
        """
        caller = self.known(authorization)
        if role not in caller.roles:
            raise Refused("role", caller.name)
        if caller.concurrency is not None and caller.in_flight >= caller.concurrency:
            raise Refused("concurrency", caller.name)
        if wait := caller.wait(self._clock()):
            raise Refused("rate", caller.name, wait)
        caller.in_flight += 1
        return caller

    @staticmethod
    def end(caller: Caller) -> None:
        caller.in_flight -= 1


def load_callers(variables: Mapping[str, str] | None = None) -> Callers | None:
    """Callers of the file RELAX_GATEWAY_TOKENS and the run's own of RELAX_GATEWAY_TOKEN (or
    RELAX_GATEWAY_TOKEN_FILE), who may ask every role; None: nobody is asked for a token.

    Raises:
        PermanentError: file or token cannot be used.
    """
    given = os.environ if variables is None else variables
    found: list[Caller] = []
    if own := secret(OWN, given):
        if len(own) < SHORTEST:
            raise PermanentError(
                f"{OWN} has {len(own)} characters; {SHORTEST} are the least.",
                cure="For example: openssl rand -hex 32",
            )
        found.append(Caller("run", hashlib.sha256(own.encode()).digest(), _roles(None)))
    if (path := given.get(FILE)) is not None:
        if not path.strip():
            raise PermanentError(
                f"{FILE} is set and names no file.",
                cure="Name the file of callers, or unset it where everybody may call.",
            )
        found += _of_file(Path(path))
    if len({caller.digest for caller in found}) < len(found):
        raise PermanentError("Two callers of the gateway have the same token.", cure="Change one.")
    return Callers(found) if found else None


def _of_file(path: Path) -> list[Caller]:
    text = read_private(path, FILE)
    try:
        document: Any = yaml.safe_load(text)
        file = CallersFile.model_validate(document)
    except yaml.YAMLError as error:
        # The parser's own words would quote the line, and so perhaps a token.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise PermanentError(f"{path} ({FILE}) is not YAML{where}.", cure="Correct it.") from None
    except ValidationError as error:
        # Nor may pydantic's, which show the value.
        fields = error.errors(include_input=False, include_url=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in fields)
        raise PermanentError(f"{path} ({FILE}): {told}.", cure="See docs/security.md.") from None
    return [_caller(name, entry) for name, entry in file.callers.items()]


def _caller(name: str, entry: CallerEntry) -> Caller:
    if entry.token is not None:
        remember_secret(entry.token)
        digest = hashlib.sha256(entry.token.encode()).digest()
    else:
        assert entry.token_sha256 is not None
        digest = bytes.fromhex(entry.token_sha256)
    rate = entry.requests_per_second
    burst = entry.burst or max(1, math.ceil(rate or 1))
    return Caller(name, digest, _roles(entry.roles), rate, burst, entry.concurrency)


def _roles(roles: Iterable[str] | None) -> frozenset[str]:
    return frozenset(("rollout", "genrm", "teacher") if roles is None else roles)
