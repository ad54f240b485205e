"""Model configs of the golden files, and the times of their datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SEQ_LENGTH = 16
BATCH = 8
"""Rows of an optimizer step at every layout."""

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


def set_times(folder: Path) -> None:
    """Give datasets the times that the names of their caches are made of."""
    for path in folder.iterdir():
        os.utime(path, ns=(10**18, 10**18))
