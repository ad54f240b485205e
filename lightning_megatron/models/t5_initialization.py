"""How large do T5's weights start? Each matrix has a standard deviation of its own, because scores are not scaled.

Source: transformers 5.23, models/t5/modeling_t5.py, ``_init_weights`` (after mesh-tensorflow): everything is multiplied
by ``initializer_factor``, which is ``ModelConfig.init_method_std`` here.
"""

from __future__ import annotations

import torch

from lightning_megatron.models.config import ModelConfig


def t5_scale(key: str, model: ModelConfig) -> float | torch.Tensor:
    """Standard deviation of a matrix, in units of ``initializer_factor``.

    Args:
        key: Its name in Megatron's checkpoints.
        model: The description.

    Returns:
        A number; for queries, keys and values in one matrix [rows, 1], fp32, on the CPU.
    """
    into_hidden: float = model.hidden_size**-0.5
    # Scores are multiplied by 1, so queries start smaller instead.
    of_queries: float = (model.hidden_size * model.kv_channels) ** -0.5
    if key.endswith("linear_qkv.weight"):
        of_head = torch.tensor([of_queries, into_hidden, into_hidden]).repeat_interleave(model.kv_channels)
        return of_head.repeat(model.num_attention_heads)[:, None]
    if key.endswith("linear_q.weight"):
        return of_queries
    if key.endswith("linear_proj.weight"):
        return float((model.num_attention_heads * model.kv_channels) ** -0.5)
    if key.endswith("linear_fc2.weight"):
        return float(model.ffn_hidden_size**-0.5)
    if key.endswith(("word_embeddings.weight", "output_layer.weight")):
        return 1.0
    return into_hidden
