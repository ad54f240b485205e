"""Core attention on torch's scaled_dot_product_attention, FlexAttention and FlashAttention.

Megatron-Core's own ``DotProductAttention`` (megatron-core 0.16.1, transformer/dot_product_attention.py) writes the
[b, np, s, s] scores to memory several times, repeats the key/value heads and refuses an attention bias. Here, on CUDA:

- no mask, causal, with or without a window or ALiBi: FlashAttention-4 where it is installed and faster;
- no mask, or causal alone: torch's scaled_dot_product_attention without a mask (``narrow_values.py`` for two widths);
- segments, windows and ALiBi without dropout, from 512 tokens on: FlexAttention, compiled, without an s x s tensor;
- segments with dropout, or in short rows: variable-length FlashAttention, with one sequence per run of a segment
  (Dao 2023, https://arxiv.org/abs/2307.08691); a dense mask takes twice as long;
- one query per row, in generation: split-K (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023);
- anything else, and everything on the CPU: a dense additive mask that all layers share.

Sinks are applied to the output of FlexAttention and of other kernels that return log-sum-exps (``sinks.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops import masks
from lightning_megatron.engine.ops.flash_attention_4 import (
    attend_flash_attention_4,
    can_use_flash_attention_4,
)
from lightning_megatron.engine.ops.flex_attention import (
    can_use_flex,
    compiled_flex,
    flex,
    flex_with_sinks,
)
from lightning_megatron.engine.ops.key_value_cache import KeyValueCache
from lightning_megatron.engine.ops.masks import Alibi, AlibiKind, Pattern
from lightning_megatron.engine.ops.narrow_values import attend_narrow
from lightning_megatron.engine.ops.sinks import (
    Sinks,
    attend_with_sinks,
    attend_with_sinks_and_dropout,
)
from lightning_megatron.engine.ops.soft_cap import soft_capped
from lightning_megatron.engine.ops.split_k import attend_split_k, num_key_splits
from lightning_megatron.engine.ops.varlen_attention import (
    attend_varlen,
    can_use_varlen,
    segment_runs,
)
from lightning_megatron.errors import ConfigError

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)

MASK_CACHE = masks.TensorCache()
"""Additive masks, block masks and ALiBi biases derived from attention masks, shared by all layers."""


class SDPAttention(MegatronModule):
    """Core attention for self- and cross-attention, MHA, GQA and MQA, on CPU and CUDA.

    The softmax is computed in float32 by every backend, so ``apply_query_key_layer_scaling`` is a no-op:
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
        *,
        sliding_window: int | None = None,
        alibi: AlibiKind | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        cache_class: type[KeyValueCache] = KeyValueCache,
    ) -> None:
        """Accept the arguments of Megatron's ``Attention`` for its core attention, and five more.

        The last five are for ``functools.partial`` in a layer's spec.

        Args:
            config: The model's config.
            layer_number: From 1.
            attn_mask_type: Default mask type; a call may replace it.
            attention_type: ``self`` or ``cross``.
            attention_dropout: Replaces the config's; None keeps it.
            softmax_scale: Factor of the scores; None for 1 / sqrt(head width).
            cp_comm_type: Unused; read from the config.
            pg_collection: Unused; the groups are Megatron's global ones.
            sliding_window: Latest tokens that a token sees, itself included; None for all.
            alibi: Variant of the linear biases; None for none.
            softcap: Replaces scores x by softcap * tanh(x / softcap) before the mask; None for no cap.
            has_sinks: Whether each head has a learned score, of no key, in the denominator of its softmax.
            cache_class: Class of the cache in generation.

        Raises:
            ConfigError: If the window is empty.
        """
        super().__init__(config=config)
        if sliding_window is not None and sliding_window < 1:
            raise ConfigError(
                f"sliding_window={sliding_window}: expected at least 1, the token itself"
            )
        self.attn_mask_type = attn_mask_type
        self.is_cross: bool = attention_type == "cross"
        self.softmax_scale: float | None = softmax_scale
        self.cache_class = cache_class
        self.kv_cache: KeyValueCache | None = None  # set during generation
        self.sliding_window = sliding_window
        self.alibi: AlibiKind | None = alibi
        self.softcap = softcap
        self._has_plain_scores = alibi is None and softcap is None
        assert self._has_plain_scores or not has_sinks, "sinks need scores without ALiBi and cap"
        self.sinks: Sinks | None = None
        if has_sinks:
            self.sinks = Sinks(config)
        self.tp_rank = 0
        if alibi is not None and config.tensor_model_parallel_size > 1:
            self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.dropout: float = config.attention_dropout
        if attention_dropout is not None:
            self.dropout = attention_dropout
        # With sequence parallelism the whole layer already runs in the fork (transformer/transformer_block.py).
        self.forks_rng: bool = (
            config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        )

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
        """Compute attention.

        Args:
            query: [sq, b, np, hn].
            key: [sk, b, ng, hn]; ng divides np.
            value: [sk, b, ng, hv]; hv is hn, but less in latent attention.
            attention_mask: Segment ids of all keys, cached ones included, integers [b, sk] (``masks.py``); or bool
                [b or 1, 1, sq or 1, sk], True for hidden keys; None for no mask.
            attn_mask_type: Replaces the layer's mask type for this call.
            attention_bias: Additive mask that replaces ``attention_mask``, [b or 1, np or 1, sq or 1, sk].
            packed_seq_params: Unused; packed rows have a mask of segments.

        Returns:
            [sq, b, np * hv].
        """
        kind = attn_mask_type or self.attn_mask_type
        mask = attention_mask
        if kind == AttnMaskType.no_mask:
            mask = None
        sq = query.shape[0]
        q = query.permute(1, 2, 0, 3)
        k = key.permute(1, 2, 0, 3)
        v = value.permute(1, 2, 0, 3)
        step = None
        if self.kv_cache is not None:
            k, v = self.kv_cache.append(k, v)
            step = self.kv_cache.step
        sk = k.shape[2]
        causal = kind in CAUSAL and sq > 1
        window = self.sliding_window
        if window is not None and sk <= window:
            window = None
        # Without a mask torch's kernels attend to all keys, or causally from the first key on.
        is_plain = self._has_plain_scores and window is None and (not causal or sq == sk)
        dropout = self.dropout if self.training else 0.0
        pattern = Pattern(
            num_queries=sq,
            num_keys=sk,
            causal=causal,
            window=window,
            cross=self.is_cross,
        )
        if self.sinks is not None and dropout > 0.0:
            is_plain = False
        # Forking the tracker copies random states on the host, so only for actual dropout.
        fork: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if dropout > 0.0 and self.forks_rng:
            fork = get_cuda_rng_tracker().fork()
        with fork:
            if step is not None:
                added = step.additive_mask(window, self._alibi_of(q), q.dtype)
                out = self._attend_dense(q, k, v, added, dropout)
            elif attention_bias is not None:
                added = attention_bias.to(q.dtype)
                out = _sdpa_with_mask(q, k, v, added, dropout, self.softmax_scale)
            elif mask is None and self._can_use_flash_attention_4(q, k, v, pattern, dropout):
                alibi = self._alibi_of(q)
                out = attend_flash_attention_4(q, k, v, pattern, alibi, self.softmax_scale)
            elif mask is None and is_plain:
                out = self._attend_plain(q, k, v, causal, dropout)
            else:
                out = self._attend_masked(q, k, v, mask, pattern, dropout)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_plain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        """Attend to all keys, or causally from the first key on: [b, np, sq, hv]."""
        scale = self.softmax_scale
        if self.sinks is not None:
            sinks = self._own_sinks(self.sinks.scores)
            return attend_with_sinks(q, k, v, sinks, None, causal=causal, scale=scale)
        if v.shape[3] < q.shape[3]:
            return attend_narrow(q, k, v, causal=causal, dropout=dropout, scale=scale)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _attend_masked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        pattern: Pattern,
        dropout: float,
    ) -> Tensor:
        """Attend with a mask, causality over cached keys, a window, ALiBi or a soft cap: [b, np, sq, hv]."""
        if mask is None or mask.dim() == 2:  # segments
            if dropout == 0.0 and can_use_flex(q, k):
                return self._attend_flex(q, k, v, mask, pattern)
            runs = None
            is_softmax = self._has_plain_scores and self.sinks is None
            if mask is not None and is_softmax and can_use_varlen(q, k, pattern):
                runs = MASK_CACHE.get(mask, "runs", segment_runs)
            if runs is not None:
                return attend_varlen(
                    q,
                    k,
                    v,
                    runs,
                    causal=pattern.causal,
                    dropout=dropout,
                    scale=self.softmax_scale,
                )
        alibi = self._alibi_of(q)
        make = partial(_additive_mask, pattern, alibi, q.dtype, q.device)
        if mask is None:
            added = make(None)
        else:
            added = MASK_CACHE.get(mask, (pattern, alibi, q.dtype), make)
        return self._attend_dense(q, k, v, added, dropout)

    def _can_use_flash_attention_4(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        dropout: float,
    ) -> bool:
        """Whether FlashAttention-4 computes this attention without a mask."""
        is_softmax = dropout == 0.0 and self.softcap is None and self.sinks is None
        if not q.is_cuda or not is_softmax:
            return False
        return can_use_flash_attention_4(q, k, v, pattern, self._alibi_of(q))

    def _attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Attend with a dense additive mask: [b, np, sq, hv]."""
        if self.sinks is not None:
            sinks = self._own_sinks(self.sinks.scores)
            scale = self.softmax_scale
            if dropout > 0.0:
                return attend_with_sinks_and_dropout(q, k, v, sinks, added, dropout, scale)
            return attend_with_sinks(q, k, v, sinks, added, causal=False, scale=scale)
        if self.softcap is not None:
            scale = self.softmax_scale
            return attend_capped(q, k, v, added, dropout, scale, self.softcap)
        assert added is not None, "expected an additive mask: attention without one is plain"
        return _sdpa_with_mask(q, k, v, added, dropout, self.softmax_scale)

    def _attend_flex(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None,
        pattern: Pattern,
    ) -> Tensor:
        """Attend by FlexAttention: [b, np, sq, hv]."""
        if segments is None:
            blocks = masks.block_mask_without_segments(pattern, q.device)
        else:
            blocks = MASK_CACHE.get(
                segments, pattern, lambda own: masks.block_mask(own, pattern, own.device)
            )
        key_biases = _key_biases(self._alibi_of(q), segments, pattern, q.device)
        biases = None
        if key_biases is not None:
            biases = (key_biases, key_biases[..., pattern.first_query :])
        # All that a graph is specialized on except lengths: layers of one kind share a graph.
        heads = (
            q.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[3],
            v.shape[3],
            q.dtype,
            torch.is_grad_enabled(),
        )
        hidden = (pattern.causal, pattern.window, pattern.cross)
        kind = (
            *heads,
            *hidden,
            key_biases is not None and key_biases.dim(),
            self.softcap,
            self.softmax_scale,
        )
        if self.sinks is not None:
            sinks = self._own_sinks(self.sinks.scores)
            with_sinks: Callable[..., Tensor] = flex_with_sinks
            if q.is_cuda:
                with_sinks = compiled_flex(kind, flex_with_sinks)
            return with_sinks(q, k, v, blocks, sinks, self.softmax_scale)
        function = compiled_flex(kind) if q.is_cuda else flex
        return function(q, k, v, blocks, biases, self.softcap, self.softmax_scale)

    def _own_sinks(self, sinks: Tensor) -> Tensor:
        """Sinks of the heads that this rank attends with, [np], of those of its tensor-parallel rank."""
        return sinks

    def _alibi_of(self, q: Tensor) -> Alibi | None:
        """ALiBi of the heads of ``q``, [b, np, sq, hn]; None without ALiBi."""
        if self.alibi is None:
            return None
        scale = self.softmax_scale
        if scale is None:
            scale = q.shape[3] ** -0.5
        # Not num_attention_heads_per_partition, which counts the heads of a group if there are fewer groups than ranks.
        return Alibi(
            kind=self.alibi,
            num_heads=self.config.num_attention_heads,
            first_head=self.tp_rank * q.shape[1],
            num_local_heads=q.shape[1],
            scale=scale,
        )


def _additive_mask(
    pattern: Pattern,
    alibi: Alibi | None,
    dtype: torch.dtype,
    device: torch.device,
    mask: Tensor | None,
) -> Tensor | None:
    """Dense additive mask of a mask, a pattern and ALiBi; None if nothing is added."""
    has_segments = mask is not None and mask.dim() == 2
    hidden = masks.hidden_keys(mask, pattern, device)
    biases = _key_biases(alibi, mask if has_segments else None, pattern, device)
    if hidden is None and biases is None:
        return None
    bias = None
    if biases is not None:
        bias = masks.relative_biases(biases, pattern.num_queries)
    return masks.additive_mask(hidden, bias, dtype)


def _key_biases(
    alibi: Alibi | None,
    segments: Tensor | None,
    pattern: Pattern,
    device: torch.device,
) -> Tensor | None:
    """ALiBi biases of the keys, [b, np, sk] or [np, sk], fp32; None without ALiBi."""
    if alibi is None:
        return None
    if segments is None:
        return masks.key_biases(alibi, None, pattern.num_keys, device)

    def make(own: Tensor) -> Tensor:
        return masks.key_biases(alibi, own, pattern.num_keys, device)

    return MASK_CACHE.get(segments, alibi, make)


def attend_capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    dropout: float,
    scale: float | None,
    cap: float,
) -> Tensor:
    """Attention with scores that are soft-capped before the mask is added: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hn].
        added: Additive mask, [b or 1, np or 1, sq or 1, sk]; None if no key is hidden.
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for 1 / sqrt(hn).
        cap: Bound of the scaled scores.
    """
    rows, heads, queries, width = q.shape
    if scale is None:
        scale = width**-0.5
    # Heads of a group become queries of one head, so no key is copied.
    grouped = q.reshape(rows, k.shape[1], -1, width)
    products = torch.matmul(grouped, k.transpose(2, 3)) * scale
    scores = soft_capped(products.view(rows, heads, queries, -1), cap)
    if added is not None:
        scores = scores + added
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return torch.matmul(weights.view(products.shape), v).view(q.shape)


def _sdpa_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention by torch's scaled_dot_product_attention or, for one query, split-K: [b, np, sq, hv].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hv].
        added: Additive mask, [b or 1, np or 1, sq or 1, sk].
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    shape = (*q.shape[:3], v.shape[3])
    groups = k.shape[1]
    if q.shape[2] == 1:  # heads of a group become queries of one head, so no key is copied
        q = q.reshape(len(q), groups, -1, q.shape[3])
        if added.shape[1] > 1:
            added = added.reshape(len(added), groups, -1, added.shape[3])
        # Split-K is not differentiable: torch's operator gives no gradients of its denominators.
        if dropout == 0.0 and not q.requires_grad and not k.requires_grad:
            splits = num_key_splits(q, k)
            if splits > 1:
                return attend_split_k(q, k, v, added, splits, scale).reshape(shape)
    if not q.is_cuda:
        grouped = q.shape[1] != groups
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            added,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=grouped,
        )
        return out.reshape(shape)
    repeats = q.shape[1] // groups
    if repeats > 1:
        # The memory-efficient kernel has no GQA; repeated heads cost less than the [b, np, s, s] of the fallback.
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
    with _without_cudnn():
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            added,
            dropout_p=dropout,
            scale=scale,
        )
    return out.reshape(shape)


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Context without cuDNN's attention: with a mask its backward pass returns NaN at s % 128 == 64 (torch 2.11).

    pytorch#196678. FlashAttention takes no mask anyway. ``sdpa_kernel`` takes 11 us of the host, this one 2.
    """
    is_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(is_enabled)
