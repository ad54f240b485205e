"""Configs of every GPT family and of each of its variants, with sizes that are unlike the defaults and each other."""

from __future__ import annotations

from typing import Any

_GPT2: dict[str, Any] = {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 17, "vocab_size": 83}
_LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 83,
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_FALCON: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 83}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2, "n_inner": 40},
    "gpt2_untied": {"model_type": "gpt2", **_GPT2, "tie_word_embeddings": False},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT2},
    "gpt_bigcode_of_many_keys": {"model_type": "gpt_bigcode", **_GPT2, "multi_query": False},
    "llama": {"model_type": "llama", **_LLAMA},
    "llama_with_attention_biases": {"model_type": "llama", **_LLAMA, "attention_bias": True},
    "llama_with_mlp_biases": {"model_type": "llama", **_LLAMA, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_LLAMA, "head_dim": 10},
    "qwen2": {"model_type": "qwen2", **_LLAMA, **_WINDOWED},
    "qwen3": {"model_type": "qwen3", **_LLAMA, **_WINDOWED, "head_dim": 10},
    "qwen3_with_biases": {"model_type": "qwen3", **_LLAMA, "attention_bias": True},
    "bloom": {"model_type": "bloom", "n_layer": 2, "hidden_size": 24, "n_head": 4, "vocab_size": 83},
    "falcon_7b": {"model_type": "falcon", **_FALCON},
    "falcon_40b": {"model_type": "falcon", **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_11b": {
        "model_type": "falcon",
        **_FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 40,
        "tie_word_embeddings": False,
    },
    "falcon_rw": {
        "model_type": "falcon",
        **_FALCON,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "falcon_with_biases": {"model_type": "falcon", **_FALCON, "bias": True},
}
