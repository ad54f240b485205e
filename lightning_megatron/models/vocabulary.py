"""What happens to the rows that pad the vocabulary? They never win, and never get a gradient."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from lightning_megatron.engine.fillers.loss import hide_padded_vocab_
from lightning_megatron.models.config import ModelConfig


def silence_padding(output_layer: torch.nn.Module, model: ModelConfig, tp: int) -> None:
    """Make the logits of padding rows -inf, so that they never win and their gradients are exactly zero.

    Args:
        output_layer: Megatron's column-parallel output layer, whose logits are [s, b, v/tp], or [s, b, v] gathered.
        model: Tells the true and the padded size of the vocabulary.
        tp: Tensor parallel size.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    padded = model.padded_vocab_size(tp)
    if padded == model.vocab_size:
        return

    def silence(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        is_gathered = output[0].shape[-1] == padded
        hide_padded_vocab_(output[0], model.vocab_size, 0 if is_gathered else tp_rank)

    output_layer.register_forward_hook(silence)
