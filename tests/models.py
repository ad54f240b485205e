"""Hugging Face config fields of the tiny test models, and options of a quiet Trainer."""

from typing import Any

VOCAB_SIZE = 83
"""For tests/parity and tests/families; a prime, so that every layout needs vocabulary padding."""
NO_DROPOUT: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
GPT2: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 4,
}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Seven layers: two or four stages are uneven, and one stage holds both encoder and decoder layers.
T5: dict[str, Any] = {
    "num_layers": 3,
    "num_decoder_layers": 4,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
}
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)
"""Options of a Trainer that prints nothing and writes no file."""
