"""How does a layer attend? Core attention on torch's scaled_dot_product_attention, for the ``core_attention`` slot.

Megatron-Core's own ``DotProductAttention`` (megatron-core 0.16.1, transformer/dot_product_attention.py) writes the
[b, np, s, s] scores to memory several times, repeats the key/value heads and refuses an attention bias.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megatron.errors import ConfigError

MASKED_SCORE = -10000.0
"""Added to a masked score, as in Megatron (transformer/utils.py:attention_mask_func).

Finite, because BERT masks every key of a padded query, and a softmax over nothing but -inf is NaN in some kernels;
large enough that exp() of it is exactly 0 beside any real score; small enough for float16.
"""

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)

_BACKENDS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN: with an explicit mask its backward returns NaN at s % 128 == 64 (pytorch#196678, torch 2.11)."""


class SDPAttention(MegatronModule):
    """Core attention for self- and cross-attention, MHA, GQA and MQA, on CPU and CUDA.

    The softmax is computed in float32 by every backend, so ``apply_query_key_layer_scaling`` has nothing to do:
    Megatron divides the scores by the layer number and multiplies them again in float32, against float16 overflow.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Take what ``megatron.core.transformer.attention.Attention`` passes to its core attention.

        Raises:
            ConfigError: If the config asks for an attention that this one does not compute.
        """
        super().__init__(config=config)
        _check(config)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale: float | None = softmax_scale
        self.dropout: float = config.attention_dropout if attention_dropout is None else attention_dropout
        # With sequence parallelism the whole layer already runs in the fork (transformer/transformer_block.py).
        self.forks_rng: bool = config.tensor_model_parallel_size > 1 and not config.sequence_parallel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Weighted sums of the values.

        Args:
            query: [sq, b, np, hn].
            key: [sk, b, ng, hn]; ng divides np.
            value: [sk, b, ng, hn].
            attention_mask: bool [b or 1, 1, sq or 1, sk], True where a key must not be seen; None for no mask.
            attn_mask_type: Replaces the layer's mask type for this call.
            attention_bias: Added to the scores, [b or 1, np or 1, sq or 1, sk].
            packed_seq_params: Must be None.

        Returns:
            [sq, b, np * hn].

        Raises:
            ConfigError: If packed sequences are passed.
        """
        if packed_seq_params is not None:
            raise ConfigError("packed_seq_params is set, but SDPAttention has no packed sequences; pad them instead")
        sq, b, np, hn = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = mask_type in _CAUSAL and sq > 1
        hidden = None if mask_type == AttnMaskType.no_mask else attention_mask
        dropout = self.dropout if self.training else 0.0
        # Forking the tracker copies random states on the host: only where a mask is really drawn.
        fork = get_cuda_rng_tracker().fork() if dropout > 0.0 and self.forks_rng else contextlib.nullcontext()
        with fork:
            if hidden is None and attention_bias is None and (not causal or sq == k.shape[2]):
                out = F.scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout, is_causal=causal, scale=self.softmax_scale, enable_gqa=np != k.shape[1]
                )
            else:
                scores = _added_scores(q, k, hidden, attention_bias, causal)
                out = _attend_with_mask(q, k, v, scores, dropout, self.softmax_scale)
        return out.permute(2, 0, 1, 3).reshape(sq, b, np * hn)


def _check(config: TransformerConfig) -> None:
    if config.context_parallel_size > 1:
        raise ConfigError(f"cp={config.context_parallel_size} needs Transformer Engine's attention; use cp=1")
    if config.window_size is not None:
        raise ConfigError(f"window_size={config.window_size} is not computed by SDPAttention; leave window_size out")
    if config.softmax_type != "vanilla":
        raise ConfigError(f"softmax_type={config.softmax_type!r} is not computed by SDPAttention; use 'vanilla'")


def _added_scores(q: Tensor, k: Tensor, hidden: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor:
    """The bias plus MASKED_SCORE where a key must not be seen, [b or 1, np or 1, sq or 1, sk] in q's dtype."""
    if causal:
        sq, sk = q.shape[2], k.shape[2]
        # With cached keys the last query sees the last key: the diagonal starts at sk - sq.
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu_(1 + sk - sq)
        hidden = future[None, None] if hidden is None else hidden | future
    if hidden is None:
        assert bias is not None, "without mask and bias the caller needs no scores"
        return bias.to(q.dtype)
    if bias is None:
        return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, MASKED_SCORE)
    # Overwritten, not added: the sum of a large bias and MASKED_SCORE could be seen again, or overflow in float16.
    return bias.to(q.dtype).masked_fill(hidden, MASKED_SCORE)


def _attend_with_mask(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, dropout: float, scale: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, scores, dropout_p=dropout, scale=scale, enable_gqa=grouped)
    if grouped:
        # The memory-efficient kernel knows no groups; repeated heads cost less than the [b, np, s, s] of the fallback.
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    with sdpa_kernel(_BACKENDS_WITH_MASK):
        return F.scaled_dot_product_attention(q, k, v, scores, dropout_p=dropout, scale=scale)
