"""Words and special tokens of the tokenizers that BERT, RoBERTa, T5 and mT5 use are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.special_tokens import TokenizerFacts
from tests.unit.data.sentence_corpus import SPECIAL

TEXT = "Unaffable cats don't sit, unlike cuttable unaffable tables; 12 cats sit."


def _word_piece() -> Any:
    from transformers import BertTokenizer

    letters = sorted({letter for letter in TEXT.lower() if letter != " "})
    pieces = [*SPECIAL[:5], *letters, *(f"##{letter}" for letter in letters), "cat", "##able", "##tt"]
    return BertTokenizer(vocab={piece: token for token, piece in enumerate(pieces)})


def _unigram(sentinels_in_vocabulary: int = 0, extra_ids: int = 100) -> Any:
    from transformers import T5Tokenizer

    letters = sorted(set(TEXT) - {" "})
    pieces = ["\u2581", *letters, "\u2581c", "able", "\u2581un", "\u2581sit", "\u2581\u6771", "\u4eac"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -float(len(piece))) for piece in pieces)]
    # As in mT5's vocabulary: at the end, with the mark, in falling order.
    vocabulary += [(f"\u2581<extra_id_{number}>", 0.0) for number in reversed(range(sentinels_in_vocabulary))]
    return T5Tokenizer(vocab=vocabulary, extra_ids=extra_ids)


def _byte_level(specials: bool = True) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import RobertaTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *alphabet, "at", "\u0120c", "\u0120cat"]
    merges = [("a", "t"), ("\u0120", "c"), ("\u0120c", "at")]
    names = ("cls_token", "sep_token", "mask_token")
    without: dict[str, Any] = {} if specials else dict.fromkeys(names)
    return RobertaTokenizer(vocab={piece: token for token, piece in enumerate(pieces)}, merges=merges, **without)


def _words(tokenizer: Any, text: str) -> list[str]:
    """The text cut where the facts say that words begin."""
    facts = TokenizerFacts.of(tokenizer, "test")
    words: list[list[int]] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if facts.begins_word[token] or not words:
            words.append([])
        words[-1].append(token)
    return [tokenizer.decode(word, clean_up_tokenization_spaces=False).strip() for word in words]


def test_words_of_word_pieces_are_those_of_its_own_splitter() -> None:
    tokenizer = _word_piece()
    numbers = tokenizer(TEXT, add_special_tokens=False).word_ids()

    facts = TokenizerFacts.of(tokenizer, "test")

    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    changes = [True, *(now != before for before, now in zip(numbers, numbers[1:], strict=False))]
    assert facts.begins_word[tokens].tolist() == changes
    assert changes.count(False) > 10


@pytest.mark.parametrize("make", [_unigram, _byte_level])
def test_words_of_marked_pieces_are_what_stands_between_spaces(make: Any) -> None:
    assert _words(make(), TEXT) == TEXT.split()


def test_each_piece_of_a_script_without_spaces_is_a_word() -> None:
    from transformers import T5Tokenizer

    pieces = ["\u2581\u6771", "\u4eac", "\u306b", "\u2581cat", "s", "\u3002"]
    unigram = T5Tokenizer(
        vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -1.0) for piece in pieces)], extra_ids=2
    )

    assert _words(unigram, "\u6771\u4eac\u306b cats\u3002") == ["\u6771", "\u4eac", "\u306b", "cats\u3002"]
    # Three bytes each; the first byte of a character begins a word.
    assert _words(_byte_level(), "\u6771\u4eac cat") == ["\u6771", "\u4eac", "cat"]


def test_special_tokens_and_sentinels_are_found_wherever_they_are(tmp_path: Path) -> None:
    bert = TokenizerFacts.of(_word_piece(), "test")
    assert (bert.pad, bert.cls, bert.sep, bert.mask, bert.bos, bert.eos) == (0, 2, 3, 4, None, None)
    assert bert.sentinels == ()
    assert np.array_equal(bert.ids, np.arange(bert.size))

    unigram = _unigram()
    t5 = TokenizerFacts.of(unigram, "test")
    assert (t5.pad, t5.eos, t5.cls) == (0, 1, None)
    assert t5.sentinels == tuple(unigram.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(100)]))

    roberta = TokenizerFacts.of(_byte_level(), "test")
    assert (roberta.cls, roberta.pad, roberta.sep, roberta.eos, roberta.mask) == (0, 1, 2, 2, 4)
