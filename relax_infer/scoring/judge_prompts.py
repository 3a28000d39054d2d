"""What a judge is shown: the recipe's text, in the judge's own tokens."""

import re
from functools import lru_cache
from typing import Any

from relax_infer.config.scoring import JUDGE_PLACES, GenRM
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.sample import Sample

_PLACES = re.compile("|".join(rf"\{{{place}\}}" for place in JUDGE_PLACES))


class JudgePrompts:
    """Prompts of one judge.

    Args:
        genrm: the recipe's section, with a prompt.
        model_id: the judge, for errors.
        folder: its Hugging Face folder, with its tokenizer.

    Raises:
        PermanentError: there is no tokenizer, or it has no chat template and ``genrm.chat`` is set.
    """

    def __init__(self, genrm: GenRM, model_id: str, folder: str) -> None:
        self._genrm = genrm
        self._tokenizer = _tokenizer(model_id, folder)
        if genrm.chat and self._tokenizer.chat_template is None:
            raise PermanentError(
                f"genrm.chat is set, but the tokenizer of {model_id} has no chat template.",
                cure="Set genrm.chat to false: the prompt is then plain text.",
            )

    def ids(self, sample: Sample) -> list[int]:
        """Token ids of the prompt about one sample."""
        text = filled(self._genrm.prompt or "", sample)
        if not self._genrm.chat:
            if self._genrm.system:
                text = f"{self._genrm.system}\n\n{text}"
            return list(self._tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        if self._genrm.system:
            messages.insert(0, {"role": "system", "content": self._genrm.system})
        rendered = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            **self._genrm.chat_template_kwargs,
        )
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def filled(template: str, sample: Sample) -> str:
    """The template with the sample in its places, in one pass: a response that spells a place, for
    instance ``{answer}``, is not filled in again."""
    values = {
        "{prompt}": sample.prompt,
        "{response}": sample.response,
        "{answer}": sample.answer,
    }
    return _PLACES.sub(lambda place: values[place[0]], template)


@lru_cache(maxsize=8)
def _tokenizer(model_id: str, folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PermanentError(
            f"The judge {model_id} has no tokenizer in {folder} to make genrm.prompt with: {error}"
        ) from error
