"""One token per character; 32 tokens in all, fillers included."""

from collections.abc import Sequence

PAD, EOS = 0, 1
_CHARACTERS = "0123456789+-*=?:#, yn>"
TOKENS: tuple[str, ...] = (
    "<pad>",
    "<eos>",
    *_CHARACTERS,
    *(f"<r{token}>" for token in range(2 + len(_CHARACTERS), 32)),
)
"""Token of each id."""

_IDS = {character: TOKENS.index(character) for character in _CHARACTERS}


def encode(text: str) -> list[int]:
    """Token ids, one per character; nothing is added in front or behind."""
    try:
        return [_IDS[character] for character in text]
    except KeyError as error:
        raise ValueError(f"{text!r} has a character that is no token: {error}") from None


def decode(ids: Sequence[int]) -> str:
    """Text of the ids up to the first end token; ids that are no character keep their names."""
    text: list[str] = []
    for token in ids:
        if token == EOS:
            break
        text.append(TOKENS[token] if 0 <= token < len(TOKENS) else f"<{token}>")
    return "".join(text)
