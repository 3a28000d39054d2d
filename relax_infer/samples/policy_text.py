"""Between text and the policy's token ids: its tokenizer, chat template and vocabulary."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError

Messages = list[dict[str, str]]
"""Turns of a conversation, each with ``role`` and ``content``."""
_SAID = "what-the-policy-said"


class PolicyText:
    """What a policy's folder says of text.

    Args:
        folder: Hugging Face folder with a tokenizer and a ``config.json``.
        switches: given to its chat template besides the messages.

    Raises:
        PermanentError: it has no tokenizer, or its config no vocabulary size.
    """

    def __init__(self, folder: str, switches: Mapping[str, Any] | None = None) -> None:
        self._switches = dict(switches or {})
        self._tokenizer = _tokenizer(folder)
        self.vocab_size = _vocab_size(folder)

    @property
    def eos_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def encode(self, messages: Messages) -> list[int]:
        """A prompt that the policy is to answer: by its chat template, or as plain paragraphs where
        it has none."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            text = "".join(f"{message['content']}\n\n" for message in messages)
            return list(tokenizer.encode(text))
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._switches
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    def encode_plain(self, text: str) -> list[int]:
        """The text as it is, with what the tokenizer puts before every text."""
        return list(self._tokenizer.encode(text))

    def encode_turn(self, text: str) -> list[int]:
        """What stands between the policy's end token and its next answer, when it is told ``text``:
        by its chat template, or as a paragraph of its own where it has none.

        Raises:
            PermanentError: the template does not show an earlier answer as it was.
        """
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return list(tokenizer.encode(f"\n\n{text}\n\n", add_special_tokens=False))
        earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        shown = tokenizer.apply_chat_template(
            [*earlier, {"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            **self._switches,
        )
        _, said, after = shown.partition(_SAID)
        _, end, rest = after.partition(tokenizer.eos_token)
        if not said or not end:
            raise PermanentError(
                "rollout.environment: the policy's chat template does not show an earlier answer"
                " with its end token, so turns cannot follow one another."
            )
        return list(tokenizer.encode(rest, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def asked(question: str, system: str) -> Messages:
    """A question, after a system message if there is one."""
    messages = [{"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *messages] if system else messages


@lru_cache(maxsize=8)
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PermanentError(
            f"rollout.model: {folder} has no tokenizer to make prompts with: {error}",
            cure="Name a folder that holds the policy and its tokenizer.",
        ) from error


def _vocab_size(folder: str) -> int:
    """Of the model, which may be larger than its tokenizer's."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise PermanentError(f"rollout.model: {folder}/config.json says no vocab_size") from error
