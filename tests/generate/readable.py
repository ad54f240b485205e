"""A tokenizer whose tokens read as a test says, byte by byte."""

from collections.abc import Mapping
from typing import Any


def byte_level_tokenizer(pieces: Mapping[int, bytes]) -> Any:
    """A transformers tokenizer whose tokens stand for these bytes, as those of GPT-2 and Llama 3 do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GPT-2's alphabet: printable bytes stand for themselves, the others for letters from 256 on.
    printable = [b for b in range(256) if chr(b) in letters]
    others = iter(chr(256 + n) for n in range(256 - len(printable)))
    letter_of = {b: chr(b) if b in printable else next(others) for b in range(256)}
    vocabulary = {"".join(letter_of[b] for b in piece): token for token, piece in pieces.items()}
    assert len(vocabulary) == len(pieces), "two tokens read alike"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
