"""Messages for a judge: the model's own chat template in front, the text of its answer behind.

The template runs in a thread, since a long conversation takes milliseconds. Tokenizers are read
from folders on first use and kept.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from relax_infer.contracts.failures import PermanentError
from relax_infer.gateway._errors import RETRY_SOON, GatewayError
from relax_infer.gateway._payload import RawRequest, Selectors

log = logging.getLogger(__name__)

Message = dict[str, Any]
Render = Callable[[str, list[Message], dict[str, Any] | None], Awaitable[dict[str, Any]]]
"""``(model id, messages, sampling_params)`` to a payload for an engine's ``/generate``."""

Locate = Callable[[str], Awaitable[str | None]]
"""A model id to the folder of its tokenizer; None: not known."""

MAX_NEW_TOKENS = 1024
_THREADS = 2


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


class ChatTemplates:
    """Renders messages to token ids, by model; an instance is a :data:`Render`."""

    def __init__(
        self,
        folders: Mapping[str, str | Path] | None = None,
        *,
        locate: Locate | None = None,
        template_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> None:
        """
        Args:
            folders: model id to the folder of its tokenizer.
            locate: asked for a model that ``folders`` does not name.
            template_kwargs: model id to what its template is given besides the messages.
            max_new_tokens: of requests that do not say.
        """
        self._folders = {model: Path(folder) for model, folder in (folders or {}).items()}
        self._locate = locate
        self.change(template_kwargs or {}, max_new_tokens)
        self._tokenizers: dict[Path, Tokenizer] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="template")

    def change(
        self, template_kwargs: Mapping[str, Mapping[str, Any]], max_new_tokens: int | None
    ) -> None:
        """From the next request on; None: :data:`MAX_NEW_TOKENS`."""
        self._kwargs = template_kwargs
        self._defaults = {
            "temperature": 0.2,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": max_new_tokens or MAX_NEW_TOKENS,
        }

    def load(self) -> None:
        """Read every tokenizer of ``folders`` now.

        Raises:
            PermanentError: one cannot be read or has no chat template.
        """
        for model, folder in self._folders.items():
            self._tokenizer(model, folder)

    async def __call__(
        self, model: str, messages: list[Message], sampling_params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The payload for the engine.

        Raises:
            GatewayError: 400, the template refuses the messages or no tokenizer is known;
                503, the tokenizer cannot be read.
        """
        folder = await self._folder(model)
        ids = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._prompt, model, folder, messages
        )
        return {"input_ids": ids, "sampling_params": self._defaults | (sampling_params or {})}

    async def _folder(self, model: str) -> Path:
        if model in self._folders:
            return self._folders[model]
        found = None if self._locate is None else await self._locate(model)
        if found is None or not await asyncio.to_thread(Path(found).is_dir):
            where = "" if found is None else f" ({found} is no folder here)"
            raise GatewayError(
                400,
                f"No tokenizer of {model!r} is known here{where}: send input_ids, or start the"
                f" gateway with --genrm-tokenizer {model}=FOLDER",
            )
        return Path(found)

    def _prompt(self, model: str, folder: Path, messages: list[Message]) -> list[int]:
        try:
            tokenizer = self._tokenizer(model, folder)
        except PermanentError as error:
            log.error("%s", error)
            raise GatewayError(503, error.message, (RETRY_SOON,)) from error
        try:
            ids = tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **self._kwargs.get(model, {}),
            )
            return [int(token) for token in ids]
        except Exception as error:  # a template may raise anything about what it is given
            text = f"The chat template of {model!r} refuses these messages: {error}"
            raise GatewayError(400, text[:2000]) from error

    def _tokenizer(self, model: str, folder: Path) -> Tokenizer:
        if folder not in self._tokenizers:
            self._tokenizers[folder] = read_tokenizer(model, folder)
        return self._tokenizers[folder]


def read_tokenizer(model: str, folder: Path) -> Tokenizer:
    """A tokenizer with a chat template, from a folder on this machine.

    Raises:
        PermanentError: there is none, or it has no template.
    """
    if not folder.is_dir():
        raise PermanentError(
            f"the tokenizer of {model}: {folder} is no folder.",
            cure="Name the folder of the model's checkpoint.",
        )
    try:
        tokenizer = _from_folder(folder)
    except Exception as error:  # whatever stands in the folder
        told = " ".join(str(error).split())
        raise PermanentError(
            f"the tokenizer of {model} cannot be read from {folder}: {told}",
            cure="Name the folder of the model's checkpoint, with tokenizer.json in it.",
        ) from error
    if not getattr(tokenizer, "chat_template", None):
        raise PermanentError(
            f"the tokenizer of {model} in {folder} has no chat template.",
            cure="Messages need one; callers may send input_ids instead.",
        )
    return tokenizer


def _from_folder(folder: Path) -> Any:
    """Imported here: seconds, and only for messages; the second way imports torch as well."""
    if (folder / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def request_of(payload: Mapping[str, Any], rids: Sequence[str]) -> RawRequest:
    """A rendered payload as a request; it gets an id, so that it can be aborted."""
    named = rids[0] if rids else f"judge-{uuid.uuid4().hex}"
    body = msgspec.json.encode({**payload, "rid": named})
    return RawRequest(Selectors(None, None, (named,)), False, body)


def verdict_of(body: bytes) -> str:
    """The text of an engine's answer.

    Raises:
        GatewayError: 503, the engine was made to stop before its end, so that the text is part of
            a verdict; 502, there is no text.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):  # such as numbers beyond what Python takes
        raise GatewayError(502, "Inference backend answered no text") from None
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise GatewayError(503, "The judge was interrupted", (RETRY_SOON,))
    text = answer.get("text") if isinstance(answer, dict) else None
    if not isinstance(text, str):
        raise GatewayError(502, "Inference backend answered no text")
    return text.strip()
