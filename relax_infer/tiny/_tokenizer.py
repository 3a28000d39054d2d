"""The character tokenizer as a Hugging Face tokenizer. Only the maker process imports this."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relax_infer.tiny.vocabulary import EOS, PAD, TOKENS


def hugging_face_tokenizer() -> PreTrainedTokenizerFast:
    """Same ids as :func:`relax_infer.tiny.vocabulary.encode`; adds no token of its own."""
    ids = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=TOKENS[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([token for token in TOKENS if len(token) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TOKENS[EOS],
        pad_token=TOKENS[PAD],
        clean_up_tokenization_spaces=False,
    )
