"""Core attention on torch's scaled_dot_product_attention, FlexAttention and FlashAttention.

Megatron-Core's own ``DotProductAttention`` (megatron-core 0.16.1, transformer/dot_product_attention.py) writes the
[b, np, s, s] scores to memory several times, repeats the key/value heads and refuses an attention bias. Here, on CUDA:

- no mask, or causal alone: torch's scaled_dot_product_attention without a mask;
- segments, windows and ALiBi without dropout, from 512 tokens on: FlexAttention, compiled, without an s x s tensor;
- segments with dropout, or in short rows: variable-length FlashAttention, with one sequence per run of a segment
  (Dao 2023, https://arxiv.org/abs/2307.08691); a dense mask takes twice as long;
- one query per row, in generation: split-K (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023);
- anything else, and everything on the CPU: a dense additive mask that all layers share.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lightning_megatron.engine.fillers import masks
from lightning_megatron.engine.fillers.kernels import soft_capped
from lightning_megatron.engine.fillers.masks import Alibi, AlibiKind, Pattern
from lightning_megatron.errors import ConfigError

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)

_BACKENDS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN: with an explicit mask its backward returns NaN at s % 128 == 64 (pytorch#196678, torch 2.11)."""

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
    ) -> None:
        """Accept the arguments of Megatron's ``Attention`` for its core attention, and three more.

        The last three are for ``functools.partial`` in a layer's spec.

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
        self.kv_cache: KeyValueCache | None = None  # set during generation
        self.sliding_window = sliding_window
        self.alibi: AlibiKind | None = alibi
        self.softcap = softcap
        self._has_plain_scores = alibi is None and softcap is None
        has_slopes = alibi is not None and config.tensor_model_parallel_size > 1
        self.tp_rank: int = parallel_state.get_tensor_model_parallel_rank() if has_slopes else 0
        self.dropout: float = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
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
            value: [sk, b, ng, hn].
            attention_mask: Segment ids of all keys, cached ones included, integers [b, sk] (``masks.py``); or bool
                [b or 1, 1, sq or 1, sk], True for hidden keys; None for no mask.
            attn_mask_type: Replaces the layer's mask type for this call.
            attention_bias: Additive mask that replaces ``attention_mask``, [b or 1, np or 1, sq or 1, sk].
            packed_seq_params: Unused; packed rows have a mask of segments.

        Returns:
            [sq, b, np * hn].
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        mask = None if kind == AttnMaskType.no_mask else attention_mask
        sq, b, np, hn = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        step = None
        if self.kv_cache is not None:
            k, v = self.kv_cache.append(k, v)
            step = self.kv_cache.step
        causal, sk = kind in CAUSAL and sq > 1, k.shape[2]
        window = (
            None
            if self.sliding_window is None or sk <= self.sliding_window
            else self.sliding_window
        )
        # Without a mask torch's kernels attend to all keys, or causally from the first key on.
        is_plain = self._has_plain_scores and window is None and (not causal or sq == sk)
        dropout = self.dropout if self.training else 0.0
        # Forking the tracker copies random states on the host, so only for actual dropout.
        fork = (
            get_cuda_rng_tracker().fork()
            if dropout > 0.0 and self.forks_rng
            else contextlib.nullcontext()
        )
        with fork:
            if step is not None:
                out = self._attend_dense(
                    q, k, v, step.additive_mask(window, self._alibi_of(q), q.dtype), dropout
                )
            elif attention_bias is not None:
                out = _sdpa_with_mask(
                    q, k, v, attention_bias.to(q.dtype), dropout, self.softmax_scale
                )
            elif mask is None and is_plain:
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    None,
                    dropout,
                    causal,
                    scale=self.softmax_scale,
                    enable_gqa=np != k.shape[1],
                )
            else:
                pattern = Pattern(
                    num_queries=sq, num_keys=sk, causal=causal, window=window, cross=self.is_cross
                )
                out = self._attend_masked(q, k, v, mask, pattern, dropout)
        return out.permute(2, 0, 1, 3).reshape(sq, b, np * hn)

    def _attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern, dropout: float
    ) -> Tensor:
        """Attend with a mask, causality over cached keys, a window, ALiBi or a soft cap: [b, np, sq, hn]."""
        if mask is None or mask.dim() == 2:  # segments
            if dropout == 0.0 and can_use_flex(q, k):
                return self._attend_flex(q, k, v, mask, pattern)
            runs = None
            if mask is not None and self._has_plain_scores and can_use_varlen(q, k, pattern):
                runs = MASK_CACHE.get(mask, "runs", segment_runs)
            if runs is not None:
                return attend_varlen(
                    q, k, v, runs, causal=pattern.causal, dropout=dropout, scale=self.softmax_scale
                )
        alibi = self._alibi_of(q)
        make = partial(_additive_mask, pattern, alibi, q.dtype, q.device)
        added = (
            make(None) if mask is None else MASK_CACHE.get(mask, (pattern, alibi, q.dtype), make)
        )
        return self._attend_dense(q, k, v, added, dropout)

    def _attend_dense(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float
    ) -> Tensor:
        """Attend with a dense additive mask: [b, np, sq, hn]."""
        if self.softcap is not None:
            return attend_capped(q, k, v, added, dropout, self.softmax_scale, self.softcap)
        assert added is not None, "expected an additive mask: attention without one is plain"
        return _sdpa_with_mask(q, k, v, added, dropout, self.softmax_scale)

    def _attend_flex(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, pattern: Pattern
    ) -> Tensor:
        """Attend by FlexAttention: [b, np, sq, hn]."""
        if segments is None:
            blocks = masks.block_mask_without_segments(pattern, q.device)
        else:
            blocks = MASK_CACHE.get(
                segments, pattern, lambda own: masks.block_mask(own, pattern, own.device)
            )
        key_biases = _key_biases(self._alibi_of(q), segments, pattern, q.device)
        biases = (
            None if key_biases is None else (key_biases, key_biases[..., pattern.first_query :])
        )
        # All that a graph is specialized on except lengths: layers of one kind share a graph.
        heads = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.dtype, torch.is_grad_enabled())
        hidden = (pattern.causal, pattern.window, pattern.cross)
        kind = (
            *heads,
            *hidden,
            key_biases is not None and key_biases.dim(),
            self.softcap,
            self.softmax_scale,
        )
        function = _compiled_flex(kind) if q.is_cuda else _flex
        return function(q, k, v, blocks, biases, self.softcap, self.softmax_scale)

    def _alibi_of(self, q: Tensor) -> Alibi | None:
        """ALiBi of the heads of ``q``, [b, np, sq, hn]; None without ALiBi."""
        if self.alibi is None:
            return None
        # Not num_attention_heads_per_partition, which counts the heads of a group if there are fewer groups than ranks.
        return Alibi(
            kind=self.alibi,
            num_heads=self.config.num_attention_heads,
            first_head=self.tp_rank * q.shape[1],
            num_local_heads=q.shape[1],
            scale=q.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale,
        )


def _additive_mask(
    pattern: Pattern,
    alibi: Alibi | None,
    dtype: torch.dtype,
    device: torch.device,
    mask: Tensor | None,
) -> Tensor | None:
    """Dense additive mask of a mask, a pattern and ALiBi; None if nothing is added."""
    hidden = masks.hidden_keys(mask, pattern, device)
    biases = _key_biases(
        alibi, mask if mask is not None and mask.dim() == 2 else None, pattern, device
    )
    if hidden is None and biases is None:
        return None
    bias = None if biases is None else masks.relative_biases(biases, pattern.num_queries)
    return masks.additive_mask(hidden, bias, dtype)


def _key_biases(
    alibi: Alibi | None, segments: Tensor | None, pattern: Pattern, device: torch.device
) -> Tensor | None:
    """ALiBi biases of the keys, [b, np, sk] or [np, sk], fp32; None without ALiBi."""
    if alibi is None:
        return None
    if segments is None:
        return masks.key_biases(alibi, None, pattern.num_keys, device)
    return MASK_CACHE.get(
        segments, alibi, lambda own: masks.key_biases(alibi, own, pattern.num_keys, device)
    )


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
    grouped = (
        rows,
        k.shape[1],
        -1,
        width,
    )  # heads of a group become queries of one head, so no key is copied
    products = torch.matmul(q.reshape(grouped), k.transpose(2, 3)) * (
        width**-0.5 if scale is None else scale
    )
    scores = soft_capped(products.view(rows, heads, queries, -1), cap)
    weights = torch.softmax(
        scores if added is None else scores + added, dim=-1, dtype=torch.float32
    ).to(v.dtype)
    dropped = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return torch.matmul(dropped.view(*products.shape), v).view(q.shape)


def _sdpa_with_mask(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Attention by torch's scaled_dot_product_attention or, for one query, split-K: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hn].
        added: Additive mask, [b or 1, np or 1, sq or 1, sk].
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    shape, groups = q.shape, k.shape[1]
    if q.shape[2] == 1:  # heads of a group become queries of one head, so no key is copied
        q = q.reshape(len(q), groups, -1, q.shape[3])
        if added.shape[1] > 1:
            added = added.reshape(len(added), groups, -1, added.shape[3])
        # Split-K is not differentiable: torch's operator gives no gradients of its denominators.
        splits = 1 if dropout > 0.0 or q.requires_grad or k.requires_grad else num_key_splits(q, k)
        if splits > 1:
            return attend_split_k(q, k, v, added, splits, scale).reshape(shape)
    if not q.is_cuda:
        grouped = q.shape[1] != groups
        out = F.scaled_dot_product_attention(
            q, k, v, added, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        return out.reshape(shape)
    if (repeats := q.shape[1] // groups) > 1:
        # The memory-efficient kernel has no GQA; repeated heads cost less than the [b, np, s, s] of the fallback.
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    with sdpa_kernel(_BACKENDS_WITH_MASK):
        out = F.scaled_dot_product_attention(q, k, v, added, dropout_p=dropout, scale=scale)
    return out.reshape(shape)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------

MIN_FLEX_LENGTH = 512
"""Minimum number of queries and keys: below it a dense mask is small, and compilation costs more than it saves."""

_FUNCTION_IDS = itertools.count()


def can_use_flex(q: Tensor, k: Tensor) -> bool:
    """Whether FlexAttention's compiled kernels support these queries and keys ([b, np, s, hn])."""
    return (
        _has_kernels(q)
        and min(q.shape[2], k.shape[2]) >= MIN_FLEX_LENGTH
        and 16 <= q.shape[3] <= 256
    )


def _has_kernels(q: Tensor) -> bool:
    return (
        q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and _is_ampere_or_newer(q.device)
    )


@functools.cache
def _is_ampere_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    biases: tuple[Tensor, Tensor] | None,
    cap: float | None,
    scale: float | None,
) -> Tensor:
    """Attention by FlexAttention: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn].
        v: [b, ng, sk, hn].
        mask: Result of ``masks.block_mask``.
        biases: ALiBi biases of keys and of queries, whose difference is added to the scores, [b, np, s] or [np, s]
            fp32; None without ALiBi.
        cap: Soft cap of the scores, applied first, see ``attend_capped``; None for none.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """

    def modify(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if biases is None:
            return score
        key_biases, query_biases = biases
        if key_biases.dim() == 3:
            return score + (key_biases[row, head, key] - query_biases[row, head, query])
        return score + (key_biases[head, key] - query_biases[head, query])

    score_mod = None if biases is None and cap is None else modify
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex_attention(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped
    )
    return out


@functools.cache
def _compiled_flex(kind: Hashable) -> Callable[..., Tensor]:
    """``_flex``, compiled once per kind of attention for all lengths: the second length makes the graph dynamic.

    Each kind has its own code object: torch limits recompilations per code object to eight, then runs it uncompiled.
    """
    name = f"_flex_{next(_FUNCTION_IDS)}"
    function = types.FunctionType(_flex.__code__.replace(co_name=name), globals(), name)
    compiled: Callable[..., Tensor] = torch.compile(function)
    return compiled


# ---- variable-length FlashAttention ----------------------------------------------------------------------------------


class SegmentRuns(NamedTuple):
    """Runs of equal segment ids in the concatenated rows of a batch, as FlashAttention's sequences."""

    cu_seqlens: Tensor
    """Beginnings of the runs and the end of the last: [runs + 1], int32."""
    max_seqlen: int
    """Length of the longest run."""


def segment_runs(segments: Tensor) -> SegmentRuns | None:
    """Runs of equal segment ids in [b, s] segments; None if a segment has several runs, which would see each other.

    Padding (0) may have several runs: what it sees does not matter. Synchronizes with the device, once for each mask.
    """
    rows, length = segments.shape
    ids = segments.cpu()
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    row, column = begins.nonzero(as_tuple=True)
    is_segment = ids[row, column] != 0
    pairs = torch.stack((row, ids[row, column]), dim=1)[is_segment]
    if len(torch.unique(pairs, dim=0)) < len(pairs):
        return None
    bounds = torch.cat((row * length + column, torch.tensor([rows * length]))).int()
    return SegmentRuns(
        cu_seqlens=bounds.to(segments.device, non_blocking=True),
        max_seqlen=int(bounds.diff().max()),
    )


def can_use_varlen(q: Tensor, k: Tensor, pattern: Pattern) -> bool:
    """Whether variable-length FlashAttention supports these queries and keys ([b, np, s, hn]) and ``pattern``."""
    fits = q.shape[2] == k.shape[2] and not pattern.cross and pattern.window is None
    return _has_kernels(q) and fits and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: SegmentRuns,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention within each run by variable-length FlashAttention: [b, np, s, hn].

    Args:
        q: [b, np, s, hn].
        k: [b, ng, s, hn].
        v: [b, ng, s, hn].
        runs: Tokens that see each other.
        causal: Whether later keys are hidden from a query.
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    b, np, s, hn = q.shape
    if (repeats := np // k.shape[1]) > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    packed = [x.transpose(1, 2).reshape(b * s, np, hn) for x in (q, k, v)]
    # The operator beneath torch's scaled_dot_product_attention, which itself does not take sequence lengths.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *packed,
        runs.cu_seqlens,
        runs.cu_seqlens,
        runs.max_seqlen,
        runs.max_seqlen,
        dropout,
        causal,
        False,
        scale=scale,
    )[0]
    return out.view(b, s, np, hn).transpose(1, 2)


# ---- split-K, for one query per row ----------------------------------------------------------------------------------

SPLIT_SIZE = 128
"""Minimum keys of a split, which the memory-efficient kernel reads at once."""


def num_key_splits(q: Tensor, k: Tensor) -> int:
    """Number of equal splits of the keys; 1 on the CPU, without a gain, or for shapes that the kernel does not support.

    Args:
        q: [b, ng, repeats, hn].
        k: [b, ng, sk, hn].
    """
    if not q.is_cuda or q.shape[3] % 8 != 0 or k.shape[2] % SPLIT_SIZE != 0:
        return 1
    max_splits = torch.cuda.get_device_properties(q.device).multi_processor_count // (
        k.shape[0] * k.shape[1]
    )
    blocks = k.shape[2] // SPLIT_SIZE
    return max(splits for splits in range(1, max(max_splits, 1) + 1) if blocks % splits == 0)


def attend_split_k(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor, splits: int, scale: float | None
) -> Tensor:
    """Attention over splits of the keys, combined by their log-sum-exps: [b, ng, repeats, hn].

    Args:
        q: [b, ng, repeats, hn], the queries that share keys.
        k: [b, ng, sk, hn]; ``splits`` divides sk.
        v: [b, ng, sk, hn].
        added: Additive mask, [b or 1, ng or 1, repeats or 1, sk], with finite values in each split.
        splits: Number of splits.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    rows, groups, repeats, width = q.shape
    keys, values = (x.unflatten(2, (splits, -1)).flatten(0, 1) for x in (k, v))
    queries = q.flatten(0, 1)[:, None].expand(-1, splits, -1, -1)
    added = added.unflatten(3, (splits, -1)).transpose(2, 3)
    added = added.expand(rows, groups, splits, repeats, -1).flatten(0, 1)
    # The operator beneath torch's scaled_dot_product_attention, which itself does not return the log-sum-exps.
    outputs, log_sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, added, True, scale=scale
    )
    combined: Tensor = _compiled_combine()(outputs, log_sums)
    return combined.view(rows, groups, repeats, width)


def _combine_splits(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """Combine outputs [n, splits, repeats, hn] by log-sum-exps [n, splits, >= repeats], fp32: [n, repeats, hn]."""
    weights = log_sums[:, :, : outputs.shape[2]].softmax(dim=1)
    return (outputs.float() * weights[..., None]).sum(dim=1).to(outputs.dtype)


@functools.cache
def _compiled_combine() -> Callable[[Tensor, Tensor], Tensor]:
    """``_combine_splits``, compiled once per process for all sizes: eagerly it is five kernels per layer."""
    return torch.compile(_combine_splits, dynamic=True)


# ---- KV cache --------------------------------------------------------------------------------------------------------
# Megatron-Core's StaticInferenceContext (megatron-core 0.16.1, inference/contexts) caches one level higher, in
# Attention, with one position for all rows of a batch by which it rotates queries and keys, and refuses virtual
# pipeline stages. A cache of rotated keys needs no positions, only the order of tokens.
#
# Caches have a fixed size. In a TokenStep a pass over one token per row attends to the same slots whatever the length
# of the sequences, and depends on no value of the host, so that a GPU can replay it as a CUDA graph.

SLOT_ALIGNMENT = 8
"""Slots are a multiple of it: the memory-efficient kernel copies masks whose rows are not."""

MAX_UNSPLIT_SLOTS = 512
"""Above it slots are a multiple of ``SPLIT_SIZE``, for split-K."""


def slots_for(tokens: int) -> int:
    """Number of slots of a cache for ``tokens`` tokens per row."""
    alignment = SLOT_ALIGNMENT if tokens <= MAX_UNSPLIT_SLOTS else SPLIT_SIZE
    return -(-tokens // alignment) * alignment


class KeyValueCache:
    """Keys and values of one layer on one rank, in the dtype in which they are computed, at fixed addresses."""

    step: TokenStep | None = None
    """Set for steps of one token whose slot only the device knows."""

    def __init__(self, slots: int) -> None:
        """Create an empty cache, which allocates memory for the first keys.

        Args:
            slots: Maximum number of tokens of a row.
        """
        self.length = 0
        """Tokens of a row in the cache, without those of a ``TokenStep``."""
        self._slots = slots
        self._buffers: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the next tokens and return views of all keys and values: [b, ng, length, hn] each.

        In a ``TokenStep`` they are written to its slot, and all slots that the step attends to are returned.

        Args:
            key: [b, ng, s, hn]; s is 0 if nothing is added to an encoder's output.
            value: [b, ng, s, hn].
        """
        if not self._buffers:
            # Not torch.empty: unused slots are multiplied by 0, and NaN would stay NaN.
            self._buffers = [
                new.new_zeros(*new.shape[:2], self._slots, new.shape[3]) for new in (key, value)
            ]
        first = self.length
        if self.step is None:
            self.length += key.shape[2]
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            if self.step is None:
                buffer[:, :, first : self.length] = new
            else:
                buffer.index_copy_(2, self.step.slot, new)
        keys, values = self._visible()
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Replace row i by row ``rows[i]``; in place if the number of rows stays the same.

        Args:
            rows: [b], int64; there may be more rows than before, or fewer.
        """
        if len(rows) == len(self._buffers[0]):
            for visible in self._visible():
                visible.copy_(visible.index_select(0, rows))
        else:
            self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]

    def _visible(self) -> list[Tensor]:
        """Keys and values that a query attends to."""
        length = self.length if self.step is None else self.step.num_keys
        return [buffer[:, :, :length] for buffer in self._buffers]


class TokenStep:
    """Cache slot of the one token of each row, and which slots hold tokens, for all layers of a pass."""

    def __init__(self, slot: Tensor, is_token: Tensor) -> None:
        """Refer to buffers on the device, which the decoding loop updates.

        Args:
            slot: [1], int64, the slot of the newest token; the same in all rows.
            is_token: [b, slots], bool, False for padding of prompts; slots after ``slot`` are ignored.
        """
        self.slot = slot
        self.num_keys = is_token.shape[1]
        """Number of slots that a query attends to."""
        self._is_token = is_token
        self._masks: dict[Hashable, Tensor] = {}

    def additive_mask(self, window: int | None, alibi: Alibi | None, dtype: torch.dtype) -> Tensor:
        """Additive mask, [b, np or 1, 1, slots], computed once in a pass for all layers of a kind.

        Args:
            window: Latest tokens that a token sees, itself included; None for all.
            alibi: Linear biases; None for none.
            dtype: Dtype of the queries.
        """
        key = (window, alibi, dtype)
        if key not in self._masks:
            slots = torch.arange(self.num_keys, device=self.slot.device)
            hidden = ~self._is_token | (slots > self.slot)
            if window is not None:
                hidden = hidden | (slots <= self.slot - window)
            bias = None
            if alibi is not None:
                biases = masks.key_biases(alibi, self._is_token, self.num_keys, hidden.device)
                # Relative to the query, whose key is at ``slot``: small for near keys, as in ``relative_biases``.
                bias = (biases - biases.index_select(-1, self.slot))[:, :, None]
            self._masks[key] = masks.additive_mask(hidden[:, None, None], bias, dtype)
        return self._masks[key]
