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
_PADDED = {"pad_token_id": 0}
_NEOX = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"} | {"rotary_pct": 0.7}
_OPT = {**_FALCON, "max_position_embeddings": 17}

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
    "gemma": {"model_type": "gemma", **_LLAMA, "head_dim": 10},
    "gemma2": {"model_type": "gemma2", **_LLAMA, "head_dim": 10},
    "gemma3_text": {"model_type": "gemma3_text", **_LLAMA, "head_dim": 10},
    "phi3": {"model_type": "phi3", **_LLAMA, **_PADDED},
    "olmo2": {"model_type": "olmo2", **_LLAMA},
    "olmo2_with_biases": {"model_type": "olmo2", **_LLAMA, "attention_bias": True},
    "granite": {"model_type": "granite", **_LLAMA},
    "starcoder2": {"model_type": "starcoder2", **_LLAMA},
    "gpt_neox": {"model_type": "gpt_neox", **_NEOX},
    "gpt_neox_without_attention_biases": {"model_type": "gpt_neox", **_NEOX, "attention_bias": False},
    "smollm3": {
        "model_type": "smollm3",
        **_LLAMA,
        **_PADDED,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "stablelm": {"model_type": "stablelm", **_LLAMA, "partial_rotary_factor": 0.7},
    "stablelm_with_one_norm": {
        "model_type": "stablelm",
        **{**_LLAMA, "partial_rotary_factor": 0.7},
        "use_parallel_residual": True,
        "use_qkv_bias": True,
    },
    "opt": {"model_type": "opt", **_OPT, "ffn_dim": 40, "word_embed_proj_dim": 24},
    "cohere": {"model_type": "cohere", **_LLAMA},
    "glm": {"model_type": "glm", **_LLAMA, **_PADDED, "head_dim": 8},
    "glm4": {"model_type": "glm4", **_LLAMA, **_PADDED, "head_dim": 8},
}
