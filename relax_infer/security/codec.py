"""Payloads of Temporal sealed on their way out and opened on their way in.

The server, its database and its web UI then hold ciphertext: inputs, results, signals, updates,
heartbeats, summaries, failure texts. Ids, types, times and search attributes stay readable.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    DataConverter,
    DefaultFailureConverterWithEncodedAttributes,
    PayloadCodec,
)

from relax_infer.security.sealing import NotSealedError, Sealer, load_sealer

ENCODING = b"binary/encrypted"
KEY = "encryption-key-id"


class SealingCodec(PayloadCodec):
    """What was not sealed passes through: typed by a person, or written before keys were set."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    async def encode(self, payloads: Iterable[Payload]) -> list[Payload]:
        name = self._sealer.newest
        metadata = {"encoding": ENCODING, KEY: name.encode()}
        return [
            Payload(metadata=metadata, data=self._sealer.seal(payload.SerializeToString()))
            for payload in payloads
        ]

    async def decode(self, payloads: Iterable[Payload]) -> list[Payload]:
        return [self.opened(payload) for payload in payloads]

    def opened(self, payload: Payload) -> Payload:
        """
        Raises:
            NotSealedError: sealed under a key that is not known here, or changed.
        """
        if payload.metadata.get("encoding") != ENCODING:
            return payload
        name = payload.metadata.get(KEY, b"").decode(errors="replace")
        return Payload.FromString(self._sealer.open(payload.data, name))


def opened(payload: Payload) -> Payload:
    """A payload that was read without a client; one that is sealed under a key that is not known
    here stays as it is."""
    sealer = _known()
    if sealer is None:
        return payload
    try:
        return SealingCodec(sealer).opened(payload)
    except NotSealedError:
        return payload


_known = cache(load_sealer)


def sealed(converter: DataConverter) -> DataConverter:
    """``converter`` with the codec of RELAX_PAYLOAD_KEYS; itself, where that is not set.

    Raises:
        PermanentError: the file of keys cannot be used.
    """
    sealer = load_sealer()
    if sealer is None:
        return converter
    return replace(
        converter,
        payload_codec=SealingCodec(sealer),
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
