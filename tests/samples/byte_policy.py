"""A model folder without weights: a tokenizer of bytes, and a config. For tasks in words."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

ENDING = CHAT.replace(
    "\n{% endfor", "{% if message.role == 'assistant' %}<eos>{% endif %}\n{% endfor"
)


def byte_policy(folder: Path, *, chat: bool = False, ends_turns: bool = False) -> str:
    """The folder, written; with ``ends_turns`` its template shows where an answer ended."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    if chat:
        fast.chat_template = ENDING if ends_turns else CHAT
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320}))
    return str(folder)
