"""Bytes sealed with AES-256-GCM under a named key; the newest key seals, every known one opens."""

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relax_infer.contracts.failures import PermanentError
from relax_infer.security.secret_files import read_private
from relax_infer.telemetry import remember_secret

FILE = "RELAX_PAYLOAD_KEYS"
_NONCE, _KEY = 12, 32
_NAME = re.compile(r"[\w.\-]{1,64}")


class NotSealedError(PermanentError):
    """The bytes were sealed under another key, or are not what was sealed."""


@dataclass(frozen=True)
class Sealer:
    """Keys by name; not printed."""

    newest: str
    keys: Mapping[str, bytes]

    def __repr__(self) -> str:
        return f"Sealer({', '.join(self.keys)})"

    def seal(self, plain: bytes) -> bytes:
        """A fresh nonce of 12 bytes, then the ciphertext with its tag."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(_NONCE)
        return nonce + AESGCM(self.keys[self.newest]).encrypt(
            nonce, plain, self._bound(self.newest)
        )

    def open(self, sealed: bytes, name: str) -> bytes:
        """
        Raises:
            NotSealedError: no such key, or the bytes were changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self.keys.get(name)
        if key is None:
            raise NotSealedError(
                f"A payload is sealed under key {name!r}; known here: {', '.join(self.keys)}.",
                cure=f"Add that key to the file of {FILE}.",
            )
        try:
            return AESGCM(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], self._bound(name))
        except InvalidTag:
            raise NotSealedError(
                f"A payload does not open under key {name!r}: it was changed, or two keys have one"
                " name."
            ) from None

    @staticmethod
    def _bound(name: str) -> bytes:
        """The key's name is part of what is authenticated."""
        return b"relax payload 1 " + name.encode()


def load_sealer(variables: Mapping[str, str] | None = None) -> Sealer | None:
    """Of the file that RELAX_PAYLOAD_KEYS names: a line ``NAME BASE64`` for each key of 32 bytes,
    the newest first; None: payloads are not sealed.

    Raises:
        PermanentError: the file cannot be used.
    """
    path = (os.environ if variables is None else variables).get(FILE, "")
    if not path:
        return None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(read_private(Path(path), FILE).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, text = line.strip().partition(" ")
        try:
            key = base64.b64decode(text.strip(), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not _NAME.fullmatch(name) or len(key) != _KEY or name in keys:
            raise PermanentError(
                f"{path} ({FILE}), line {number}, is not NAME and {_KEY} bytes in base64, or"
                " repeats a name.",
                cure='For example: echo "2026-12 $(openssl rand -base64 32)"',
            )
        remember_secret(text.strip())
        keys[name] = key
    if not keys:
        raise PermanentError(f"{path} ({FILE}) has no key.", cure="See docs/security.md.")
    return Sealer(next(iter(keys)), keys)
