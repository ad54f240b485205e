"""Texts, tokenizers and model configs of the golden files: small, and none drawn from a random generator."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEQ_LENGTH = 16
BATCH = 8
"""Rows of an optimizer step at every layout."""
_WORDS = (
    "the a of in and to it is was for on as with by at this had not are but from or have an they which one you were her"
    " all she there would their we him been has when who will more no if out so said what up its about into than them"
    " can only other new some could time these two may then do first any my now such like our over man me even most"
)
WORDS = tuple(_WORDS.split())
CORPORA = {"books": 40, "web": 30}
"""Name of each corpus, and its documents."""

_NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {},
    "megatron-bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 110},
        **{"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3, "initializer_range": 0.2},
    },
    "llama": {
        **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": 110},
        **{"initializer_range": 0.2, "tie_word_embeddings": False},
    },
    "bert": {
        **{"model_type": "megatron-bert", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24},
        **{"num_attention_heads": 2, "max_position_embeddings": 32, "vocab_size": 110, "initializer_range": 0.2},
    },
    "t5": {
        **{"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 24},
        **{"num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
        **{"vocab_size": 110, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    },
}
"""Hugging Face configs with the vocabulary of the tokenizers here."""


def without_dropout(name: str) -> dict[str, Any]:
    """One of ``MODELS`` whose losses do not depend on who draws which random number."""
    model = MODELS[name]
    return {**model, **_NO_DROPOUT[model["model_type"]]}


def write_corpora(folder: Path) -> None:
    """JSON lines of documents of one to six sentences, and of instructions."""
    numbers = _numbers()
    for name, documents in CORPORA.items():
        lines = [{"text": _text(numbers, 1 + next(numbers) % 6), "title": _text(numbers, 1)} for _ in range(documents)]
        _write_lines(folder / f"{name}.jsonl", lines)
    asked = [{"prompt": _text(numbers, 1), "completion": _text(numbers, 1 + index % 2)} for index in range(14)]
    roles = ("user", "assistant", "user", "assistant")
    chats = [{"messages": [{"role": role, "content": _text(numbers, 1)} for role in roles]} for _ in range(10)]
    _write_lines(folder / "instructions.jsonl", [*asked, *chats])


def write_tokenizers(folder: Path) -> None:
    """``words`` for GPTs and T5s, a token a word; ``pieces`` for BERTs, a third of which continue a word."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>", "<user>", "<assistant>", *(f"<extra_id_{number}>" for number in range(8)), "."]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=special[3:13],
    )
    fast.chat_template = (
        "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}"
        "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    )
    fast.save_pretrained(folder / "words")
    roles = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    whole = [word for word in WORDS if len(word) < 4]
    parts = [*"abcdefghijklmnopqrstuvwxyz.", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = list(dict.fromkeys([*roles.values(), *parts, *whole]))
    pieces = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(vocabulary)}, unk_token="[UNK]"))
    pieces.normalizer = normalizers.Lowercase()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=pieces, **roles).save_pretrained(folder / "pieces")


def set_times(folder: Path) -> None:
    """Give datasets the times that the names of their caches are made of."""
    for path in folder.iterdir():
        os.utime(path, ns=(10**18, 10**18))


def _numbers() -> Iterator[int]:
    """A linear congruential generator (that of Numerical Recipes), whose high bits are used."""
    state = 12345
    while True:
        state = (1664525 * state + 1013904223) % 2**32
        yield state >> 12


def _text(numbers: Iterator[int], sentences: int) -> str:
    made = (" ".join(WORDS[next(numbers) % len(WORDS)] for _ in range(4 + next(numbers) % 9)) for _ in range(sentences))
    return " ".join(f"{sentence.capitalize()}." for sentence in made)


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
