"""Are the stored ids those of the tokenizer, whatever kind it is, and each text whole and without special tokens?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.corpus.encoder import DocumentEncoder
from lightning_megatron.data.corpus.pieces import LineBlock
from lightning_megatron.data.corpus.tokenizer import largest_id, load_tokenizer
from lightning_megatron.errors import DataError

TEXTS = ["the quick brown fox", "Jumps over ünïcödé dogs.", "the the  fox\n", "", "[SEP] unknown 漢字"]


def _trained(kind: str) -> Any:
    """A small tokenizer of the library; each adds special tokens where it is allowed to."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    corpus = ["the quick brown fox jumps over the lazy dogs " * 9]
    if kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
        ends = ("[CLS]", 1), ("[SEP]", 2)
    elif kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"])
        ends = ("<s>", 1), ("</s>", 2)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<s>", "</s>"]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
        ends = ("<s>", 0), ("</s>", 1)
    tokenizer.train_from_iterator(corpus, trainer)
    (begin, _), (end, _) = ends
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=list(ends))
    return tokenizer


def _saved(kind: str, folder: Path) -> Any:
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    if kind == "Python":  # no Rust behind it
        tokenizer: Any = ByT5Tokenizer()
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_trained(kind))
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def _encode(encoder: DocumentEncoder, texts: list[str]) -> list[list[int]]:
    import json

    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (part,) = encoder(LineBlock(path="x", lines=lines, num_bytes=0)).keys
    flat = np.frombuffer(part.tokens, encoder.dtype).tolist()
    ends = np.cumsum(part.lengths).tolist()
    sequences = iter([flat[end - length : end] for end, length in zip(ends, part.lengths, strict=True)])
    return [next(sequences) if count else [] for count in part.sequences or [1] * len(texts)]


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "BPE", "Python"])
def test_ids_are_those_of_the_tokenizer_without_special_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = _saved(kind, tmp_path)
    encoder = DocumentEncoder(tokenizer=tokenizer, keys=["text"], dtype=np.dtype("<u2"))

    encoded = _encode(encoder, TEXTS)

    assert encoded == [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert tokenizer.encode(TEXTS[0]) != encoded[0]  # which does add some
    assert max(map(max, filter(None, encoded))) <= largest_id(tokenizer)


def test_a_tokenizer_that_gives_more_than_it_says_is_refused_and_nothing_wraps_around(tmp_path: Path) -> None:
    tokenizer = _saved("BPE", tmp_path)
    encoder = DocumentEncoder(tokenizer=tokenizer, keys=["text"], dtype=np.dtype("u1"))

    with pytest.raises(DataError, match=r"the tokenizer gave the id 2\d\d, .* the uint8 that is stored"):
        encoder(LineBlock(path="x", lines=b'{"text": "the fox"}', num_bytes=0)) and _encode(encoder, ["the quick"])
