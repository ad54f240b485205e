"""Shapes of well-known models, from their published configs."""

from __future__ import annotations

from typing import Any

from lightning_megatron.models.config import ModelConfig


def gpt2(num_layers: int, hidden_size: int, num_attention_heads: int, **changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "family": "gpt2",
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "ffn_hidden_size": 4 * hidden_size,
            "num_attention_heads": num_attention_heads,
            "num_query_groups": num_attention_heads,
            "kv_channels": hidden_size // num_attention_heads,
            "vocab_size": 50257,
            "max_position_embeddings": 1024,
            **changes,
        }
    )


def llama(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], **changes: Any
) -> ModelConfig:
    return ModelConfig(
        **{
            "family": "llama",
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "ffn_hidden_size": ffn_hidden_size,
            "num_attention_heads": heads[0],
            "num_query_groups": heads[1],
            "kv_channels": hidden_size // heads[0],
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "normalization": "RMSNorm",
            "activation": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": False,
            **changes,
        }
    )


GPT2_LARGE = gpt2(36, 1280, 20)
GPT2_XL = gpt2(48, 1600, 25)
LLAMA_3_2_1B = llama(16, 2048, 8192, (32, 8), share_embeddings_and_output_weights=True)
LLAMA_3_8B = llama(32, 4096, 14336, (32, 8))
LLAMA_2_7B = llama(32, 4096, 11008, (32, 32), vocab_size=32000)
LLAMA_2_13B = llama(40, 5120, 13824, (40, 40), vocab_size=32000)
MEGATRON_CI_7B = llama(32, 4096, 16384, (32, 8), vocab_size=131072, gated_linear_unit=False, activation="gelu")
