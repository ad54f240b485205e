"""Causal depthwise convolution over tokens: each channel is a weighted sum of its last few values, then SiLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor


class CausalConvolution(torch.nn.Module):
    """Weights of the convolution: ``weight``, [channels/tp, 1, k], as in ``torch.nn.Conv1d``; the last is the token's.

    Callers apply ``convolve`` within a compiled function of theirs.
    """

    def __init__(self, channels: int, width: int, config: TransformerConfig) -> None:
        """Create uninitialized weights, on the same device as other layers.

        Args:
            channels: Channels on this rank.
            width: Tokens k that the convolution sees.
            config: Gives dtype and device.
        """
        super().__init__()
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(channels, 1, width, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weights, split over tp."""
        name = f"{prefix}weight"
        shard = make_tp_sharded_tensor_for_checkpoint(
            self.weight,
            name,
            prepend_offsets=sharded_offsets,
        )
        return {name: shard}

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        channels, _, width = self.weight.shape
        return f"channels={channels}, width={width}"


def convolve(
    x: Tensor,
    weight: Tensor,
    documents: Tensor | None,
    before: Tensor | None,
) -> Tensor:
    """SiLU of the convolution, [s, b, ...], in the dtype of ``x``; sums are in fp32.

    Args:
        x: [s, b, ...], channels on any axes.
        weight: [..., k], with the axes of channels.
        documents: [s, b], numbers of documents, which do not see each other; None for one.
        before: [k - 1, b, ...], the values before the first; None for zeros.
    """
    length = len(x)
    width = weight.shape[-1]
    total = x.float() * weight[..., -1].float()
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    extended = torch.cat((before, x))
    for distance in range(1, width):
        start = width - 1 - distance
        term = extended[start : start + length].float() * weight[..., -1 - distance].float()
        if documents is not None:
            term = term * _is_same(documents, distance).view(length, -1, *(1,) * (x.dim() - 2))
        total = total + term
    return F.silu(total).to(x.dtype)


def _is_same(documents: Tensor, distance: int) -> Tensor:
    """[s, b], bool: whether a token and that ``distance`` before it are of one document; true before the first."""
    earlier = F.pad(documents[:-distance], (0, 0, distance, 0))[: len(documents)]
    is_first = torch.arange(len(documents), device=documents.device) < distance
    return (documents == earlier) | is_first[:, None]
