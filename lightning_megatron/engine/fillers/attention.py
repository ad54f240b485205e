"""Core attention on torch's scaled_dot_product_attention, FlexAttention and FlashAttention.

Megatron-Core's own ``DotProductAttention`` (megatron-core 0.16.1, transformer/dot_product_attention.py) writes the
[b, np, s, s] scores to memory several times, repeats the key/value heads and refuses an attention bias. Here, on CUDA:

- no mask, or causal alone: torch's scaled_dot_product_attention without a mask;
- segments, windows and ALiBi without dropout, from 512 tokens on: FlexAttention, compiled, without an s x s tensor;
- segments with dropout, or in short rows: variable-length FlashAttention, each run of a segment a sequence of its own
  (Dao 2023, https://arxiv.org/abs/2307.08691); a dense mask takes twice as long;
- one query per row, while text is generated: split-K (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023);
- anything else, and everything on the CPU: a dense mask that all layers share.
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
"""Dense scores, block masks and ALiBi's biases of the masks that are alive, shared by all layers."""


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
        *,
        sliding_window: int | None = None,
        alibi: AlibiKind | None = None,
        softcap: float | None = None,
    ) -> None:
        """Take what ``megatron.core.transformer.attention.Attention`` passes to its core attention, and three more.

        The last three are for ``functools.partial`` in a layer's spec.

        Args:
            config: Of the layer.
            layer_number: From 1.
            attn_mask_type: What is hidden where a call says nothing else.
            attention_type: ``self`` or ``cross``.
            attention_dropout: Replaces the config's.
            softmax_scale: What scores are multiplied by; None for 1 / sqrt(head width).
            cp_comm_type: Unused; the config has it, too.
            pg_collection: Unused; the groups are Megatron's.
            sliding_window: How many tokens back, itself included, a token sees; None for all.
            alibi: Whose linear biases are added; None for none.
            softcap: Scores x become softcap * tanh(x / softcap) before keys are hidden; None leaves them.

        Raises:
            ConfigError: If the window is empty.
        """
        super().__init__(config=config)
        if sliding_window is not None and sliding_window < 1:
            raise ConfigError(f"sliding_window={sliding_window} would hide a token from itself; give at least 1")
        self.attn_mask_type = attn_mask_type
        self.is_cross: bool = attention_type == "cross"
        self.softmax_scale: float | None = softmax_scale
        self.kv_cache: KeyValueCache | None = None  # set while text is generated
        self.sliding_window = sliding_window
        self.alibi: AlibiKind | None = alibi
        self.softcap = softcap
        self._keeps_scores = alibi is None and softcap is None
        has_slopes = alibi is not None and config.tensor_model_parallel_size > 1
        self.tp_rank: int = parallel_state.get_tensor_model_parallel_rank() if has_slopes else 0
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
            attention_mask: Integers [b, sk], the segment of each key (``masks.py``), cached ones included; or
                bool [b or 1, 1, sq or 1, sk], True where a key must not be seen; None for no mask.
            attn_mask_type: Replaces the layer's mask type for this call.
            attention_bias: Added to the scores in place of a mask, [b or 1, np or 1, sq or 1, sk].
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
        window = None if self.sliding_window is None or sk <= self.sliding_window else self.sliding_window
        # torch's kernels need no mask where nothing is hidden, or only the future, from the first key on.
        is_plain = self._keeps_scores and window is None and (not causal or sq == sk)
        dropout = self.dropout if self.training else 0.0
        # Forking the tracker copies random states on the host: only where a mask is really drawn.
        fork = get_cuda_rng_tracker().fork() if dropout > 0.0 and self.forks_rng else contextlib.nullcontext()
        with fork:
            if step is not None:
                out = self._attend(q, k, v, step.additive_mask(window, self._alibi_of(q), q.dtype), dropout)
            elif attention_bias is not None:
                out = _attend_with_scores(q, k, v, attention_bias.to(q.dtype), dropout, self.softmax_scale)
            elif mask is None and is_plain:
                out = F.scaled_dot_product_attention(
                    q, k, v, None, dropout, causal, scale=self.softmax_scale, enable_gqa=np != k.shape[1]
                )
            else:
                pattern = Pattern(num_queries=sq, num_keys=sk, causal=causal, window=window, cross=self.is_cross)
                out = self._attend_to_some(q, k, v, mask, pattern, dropout)
        return out.permute(2, 0, 1, 3).reshape(sq, b, np * hn)

    def _attend_to_some(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern, dropout: float
    ) -> Tensor:
        """Where a mask, a window, ALiBi or a cap has a say: [b, np, sq, hn]."""
        if mask is None or mask.dim() == 2:  # of segments
            if dropout == 0.0 and can_use_flex(q, k):
                return self._attend_by_blocks(q, k, v, mask, pattern)
            runs = None
            if mask is not None and self._keeps_scores and can_use_varlen(q, k, pattern):
                runs = MASK_CACHE.get(mask, "runs", runs_of)
            if runs is not None:
                return attend_to_runs(q, k, v, runs, causal=pattern.causal, dropout=dropout, scale=self.softmax_scale)
        alibi = self._alibi_of(q)
        make = partial(_added_scores, pattern, alibi, q.dtype, q.device)
        scores = make(None) if mask is None else MASK_CACHE.get(mask, (pattern, alibi, q.dtype), make)
        return self._attend(q, k, v, scores, dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, dropout: float) -> Tensor:
        """By dense scores, which are added: [b, np, sq, hn]."""
        if self.softcap is not None:
            return attend_capped(q, k, v, scores, dropout, self.softmax_scale, self.softcap)
        assert scores is not None, "what hides nothing is plain"
        return _attend_with_scores(q, k, v, scores, dropout, self.softmax_scale)

    def _attend_by_blocks(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, pattern: Pattern) -> Tensor:
        """By FlexAttention: [b, np, sq, hn]."""
        if segments is None:
            blocks = masks.block_mask_without_segments(pattern, q.device)
        else:
            blocks = MASK_CACHE.get(segments, pattern, lambda own: masks.block_mask(own, pattern, own.device))
        of_keys = _key_biases(self._alibi_of(q), segments, pattern, q.device)
        biases = None if of_keys is None else (of_keys, of_keys[..., pattern.first_query :])
        # What a graph is compiled for, except lengths: layers of a kind share one.
        heads = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.dtype, torch.is_grad_enabled())
        hidden = (pattern.causal, pattern.window, pattern.cross)
        kind = (*heads, *hidden, of_keys is not None and of_keys.dim(), self.softcap, self.softmax_scale)
        function = _compiled_flex(kind) if q.is_cuda else _flex
        return function(q, k, v, blocks, biases, self.softcap, self.softmax_scale)

    def _alibi_of(self, q: Tensor) -> Alibi | None:
        """The linear biases of the heads of ``q``: [b, np, sq, hn]."""
        if self.alibi is None:
            return None
        # Not num_attention_heads_per_partition: with fewer groups than ranks that counts the heads of a group.
        return Alibi(
            kind=self.alibi,
            num_heads=self.config.num_attention_heads,
            first_head=self.tp_rank * q.shape[1],
            num_local_heads=q.shape[1],
            scale=q.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale,
        )


def _added_scores(
    pattern: Pattern, alibi: Alibi | None, dtype: torch.dtype, device: torch.device, mask: Tensor | None
) -> Tensor | None:
    """What a mask, if any, a pattern and ALiBi add to the scores, as one dense tensor; None for nothing."""
    hidden = masks.hidden_keys(mask, pattern, device)
    biases = _key_biases(alibi, mask if mask is not None and mask.dim() == 2 else None, pattern, device)
    if hidden is None and biases is None:
        return None
    bias = None if biases is None else masks.relative_biases(biases, pattern.num_queries)
    return masks.additive_mask(hidden, bias, dtype)


def _key_biases(alibi: Alibi | None, segments: Tensor | None, pattern: Pattern, device: torch.device) -> Tensor | None:
    """ALiBi's biases of the keys: [b, np, sk] or [np, sk], fp32."""
    if alibi is None:
        return None
    if segments is None:
        return masks.key_biases(alibi, None, pattern.num_keys, device)
    return MASK_CACHE.get(segments, alibi, lambda own: masks.key_biases(alibi, own, pattern.num_keys, device))


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float, scale: float | None, cap: float
) -> Tensor:
    """Weighted sums of the values, whose scores are capped before masks hide keys: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hn].
        added: To the capped scores, [b or 1, np or 1, sq or 1, sk]; None where no key is hidden.
        dropout: Probability with which a weight is dropped.
        scale: What scores are multiplied by; None for 1 / sqrt(hn).
        cap: Of the scores.
    """
    rows, heads, queries, width = q.shape
    grouped = (rows, k.shape[1], -1, width)  # the heads of a group are queries of one head, and no key is copied
    products = torch.matmul(q.reshape(grouped), k.transpose(2, 3)) * (width**-0.5 if scale is None else scale)
    scores = soft_capped(products.view(rows, heads, queries, -1), cap)
    weights = torch.softmax(scores if added is None else scores + added, dim=-1, dtype=torch.float32).to(v.dtype)
    dropped = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return torch.matmul(dropped.view(*products.shape), v).view(q.shape)


def _attend_with_scores(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, dropout: float, scale: float | None) -> Tensor:
    """Weighted sums of the values: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hn].
        scores: Added, [b or 1, np or 1, sq or 1, sk].
        dropout: Probability with which a weight is dropped.
        scale: What scores are multiplied by; None for 1 / sqrt(hn).
    """
    shape, groups = q.shape, k.shape[1]
    if q.shape[2] == 1:  # the heads of a group are queries of one head, and no key is copied
        q = q.reshape(len(q), groups, -1, q.shape[3])
        if scores.shape[1] > 1:
            scores = scores.reshape(len(scores), groups, -1, scores.shape[3])
        # A sum of parts has no gradients: torch's operator gives none of its denominators.
        parts = 1 if dropout > 0.0 or q.requires_grad or k.requires_grad else num_key_parts(q, k)
        if parts > 1:
            return attend_in_parts(q, k, v, scores, parts, scale).reshape(shape)
    if not q.is_cuda:
        grouped = q.shape[1] != groups
        out = F.scaled_dot_product_attention(q, k, v, scores, dropout_p=dropout, scale=scale, enable_gqa=grouped)
        return out.reshape(shape)
    if (repeats := q.shape[1] // groups) > 1:
        # The memory-efficient kernel knows no groups; repeated heads cost less than the [b, np, s, s] of the fallback.
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    with sdpa_kernel(_BACKENDS_WITH_MASK):
        out = F.scaled_dot_product_attention(q, k, v, scores, dropout_p=dropout, scale=scale)
    return out.reshape(shape)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------

SHORTEST_FLEX = 512
"""Below this many queries or keys a dense mask is small, and compiling takes longer than it saves."""


_NUMBERS = itertools.count()


def can_use_flex(q: Tensor, k: Tensor) -> bool:
    """Whether the compiled kernels take these queries and keys ([b, np, s, hn])."""
    return _has_kernels(q) and min(q.shape[2], k.shape[2]) >= SHORTEST_FLEX and 16 <= q.shape[3] <= 256


def _has_kernels(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and _is_ampere_or_newer(q.device)


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
    """Weighted sums of the values: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn].
        v: [b, ng, sk, hn].
        mask: Of ``masks.block_mask``.
        biases: ALiBi: what the positions of keys and of queries add to the scores, whose difference counts, [b, np, s]
            or [np, s] fp32.
        cap: Of the scores before that, see ``attend_capped``; None for none.
        scale: What the scores are multiplied by; None for 1 / sqrt(hn).
    """

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if biases is None:
            return score
        of_keys, of_queries = biases
        if of_keys.dim() == 3:
            return score + (of_keys[row, head, key] - of_queries[row, head, query])
        return score + (of_keys[head, key] - of_queries[head, query])

    score_mod = None if biases is None and cap is None else change
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


@functools.cache
def _compiled_flex(kind: Hashable) -> Callable[..., Tensor]:
    """Compiled once per kind of attention, for all lengths: the second length makes the graph dynamic.

    Each kind has a code object of its own, because torch counts graphs by it and gives up, uncompiled, after eight.
    """
    name = f"_flex_{next(_NUMBERS)}"
    function = types.FunctionType(_flex.__code__.replace(co_name=name), globals(), name)
    compiled: Callable[..., Tensor] = torch.compile(function)
    return compiled


# ---- variable-length FlashAttention ----------------------------------------------------------------------------------


class Runs(NamedTuple):
    """Where the runs of equal segment numbers are in a batch of rows that lie one after the other."""

    bounds: Tensor
    """Their beginnings and the end of the last: [runs + 1], int32."""
    longest: int
    """Tokens of the longest."""


def runs_of(segments: Tensor) -> Runs | None:
    """The runs of [b, s] segment numbers; None if a segment is in several pieces, which would have to see each other.

    Padding (0) may be in pieces: what it sees does not matter. The host waits for the numbers, once for each mask.
    """
    rows, length = segments.shape
    numbers = segments.cpu()
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    row, column = begins.nonzero(as_tuple=True)
    of_tokens = numbers[row, column] != 0
    pairs = torch.stack((row, numbers[row, column]), dim=1)[of_tokens]
    if len(torch.unique(pairs, dim=0)) < len(pairs):
        return None
    bounds = torch.cat((row * length + column, torch.tensor([rows * length]))).int()
    return Runs(bounds=bounds.to(segments.device, non_blocking=True), longest=int(bounds.diff().max()))


def can_use_varlen(q: Tensor, k: Tensor, pattern: Pattern) -> bool:
    """Whether the kernel takes these queries and keys ([b, np, s, hn]) and hides what ``pattern`` says."""
    fits = q.shape[2] == k.shape[2] and not pattern.cross and pattern.window is None
    return _has_kernels(q) and fits and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def attend_to_runs(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Weighted sums of the values: [b, np, s, hn].

    Args:
        q: [b, np, s, hn].
        k: [b, ng, s, hn].
        v: [b, ng, s, hn].
        runs: What sees each other.
        causal: Whether a query sees no later key.
        dropout: Probability with which a weight is dropped.
        scale: What the scores are multiplied by; None for 1 / sqrt(hn).
    """
    b, np, s, hn = q.shape
    if (repeats := np // k.shape[1]) > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    packed = [x.transpose(1, 2).reshape(b * s, np, hn) for x in (q, k, v)]
    # torch's own operator below scaled_dot_product_attention, which has no argument for sequences in one batch.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *packed, runs.bounds, runs.bounds, runs.longest, runs.longest, dropout, causal, False, scale=scale
    )[0]
    return out.view(b, s, np, hn).transpose(1, 2)


# ---- split-K, for one query per row ----------------------------------------------------------------------------------

SMALLEST_PART = 128
"""Keys: the memory-efficient kernel reads so many at once."""


def num_key_parts(q: Tensor, k: Tensor) -> int:
    """Into how many equal parts the keys are to be cut; 1 where that gains nothing, or they cannot be.

    Args:
        q: [b, ng, repeats, hn], of CUDA in a dtype and width that torch's memory-efficient kernel takes, or 1 is
            returned.
        k: [b, ng, sk, hn].
    """
    if not q.is_cuda or q.shape[3] % 8 != 0 or k.shape[2] % SMALLEST_PART != 0:
        return 1
    most = torch.cuda.get_device_properties(q.device).multi_processor_count // (k.shape[0] * k.shape[1])
    blocks = k.shape[2] // SMALLEST_PART
    return max(parts for parts in range(1, max(most, 1) + 1) if blocks % parts == 0)


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, parts: int, scale: float | None) -> Tensor:
    """Weighted sums of the values: [b, ng, repeats, hn].

    Args:
        q: [b, ng, repeats, hn], the queries that share keys.
        k: [b, ng, sk, hn]; ``parts`` divides sk.
        v: [b, ng, sk, hn].
        scores: Added, [b or 1, ng or 1, repeats or 1, sk]; each part has finite ones.
        parts: How many.
        scale: What the scores are multiplied by; None for 1 / sqrt(hn).
    """
    rows, groups, repeats, width = q.shape
    keys, values = (x.unflatten(2, (parts, -1)).flatten(0, 1) for x in (k, v))
    queries = q.flatten(0, 1)[:, None].expand(-1, parts, -1, -1)
    added = scores.unflatten(3, (parts, -1)).transpose(2, 3)
    added = added.expand(rows, groups, parts, repeats, -1).flatten(0, 1)
    # torch's own operator below scaled_dot_product_attention, which keeps the logarithms of denominators to itself.
    outputs, log_sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, added, True, scale=scale
    )
    joined: Tensor = _compiled_joining()(outputs, log_sums)
    return joined.view(rows, groups, repeats, width)


def _joined(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """[n, repeats, hn], of the parts' outputs, [n, parts, repeats, hn], and log_sums, [n, parts, >= repeats] fp32."""
    weights = log_sums[:, :, : outputs.shape[2]].softmax(dim=1)
    return (outputs.float() * weights[..., None]).sum(dim=1).to(outputs.dtype)


@functools.cache
def _compiled_joining() -> Callable[[Tensor, Tensor], Tensor]:
    """Compiled once per process for all sizes: eagerly it is five kernels in each layer."""
    return torch.compile(_joined, dynamic=True)


# ---- caches of keys and values, while text is generated --------------------------------------------------------------
# Megatron-Core's StaticInferenceContext (megatron-core 0.16.1, inference/contexts) keeps them one level higher, in
# Attention, where it knows one position for all rows of a batch, rotates queries and keys by it, and refuses virtual
# pipeline stages. Below the rotation nothing has to be known but the order in which tokens came.
#
# The caches never change their size. In a TokenStep a pass that reads one token per row looks at the same slots
# whatever the texts' length, and nothing of it depends on numbers of the host, so that a GPU can replay it as a CUDA
# graph.

SLOT_ALIGNMENT = 8
"""Slots come in multiples of it: the memory-efficient kernel copies masks whose rows do not."""

MANY_SLOTS = 512
"""Above it slots come in multiples of ``SMALLEST_PART``, so that they can be cut into parts."""


def slots_for(tokens: int) -> int:
    """How many slots a cache for so many tokens has."""
    alignment = SLOT_ALIGNMENT if tokens <= MANY_SLOTS else SMALLEST_PART
    return -(-tokens // alignment) * alignment


class KeyValueCache:
    """Keys and values of one layer on one rank, in the dtype in which they are computed, at addresses that stay."""

    step: TokenStep | None = None
    """Set while single tokens are read whose place only the device knows."""

    def __init__(self, slots: int) -> None:
        """Memory is taken when the first keys come.

        Args:
            slots: How many tokens a row may have.
        """
        self.length = 0
        """Tokens of a row that are there, those of steps apart."""
        self._slots = slots
        self._kept: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next tokens and return all: [b, ng, length, hn] each, without copying them.

        In a step they go to the slot that the device knows, and all slots that the step looks at are returned.

        Args:
            key: [b, ng, s, hn]; s is 0 where nothing comes to an encoder's output.
            value: [b, ng, s, hn].
        """
        if not self._kept:
            # Not empty: what stands in a slot that nobody sees is multiplied by 0, and NaN would stay NaN.
            self._kept = [new.new_zeros(*new.shape[:2], self._slots, new.shape[3]) for new in (key, value)]
        first = self.length
        if self.step is None:
            self.length += key.shape[2]
        for kept, new in zip(self._kept, (key, value), strict=True):
            if self.step is None:
                kept[:, :, first : self.length] = new
            else:
                kept.index_copy_(2, self.step.slot, new)
        keys, values = self._seen()
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; as many rows as before stay where they are in memory.

        Args:
            rows: [b], int64; there may be more rows than before, or fewer.
        """
        if len(rows) == len(self._kept[0]):
            for seen in self._seen():
                seen.copy_(seen.index_select(0, rows))
        else:
            self._kept = [kept.index_select(0, rows) for kept in self._kept]

    def _seen(self) -> list[Tensor]:
        """What a query looks at."""
        seen = self.length if self.step is None else self.step.num_keys
        return [kept[:, :, :seen] for kept in self._kept]


class TokenStep:
    """Where the one token of each row stands, and what is in the slots of the caches, for all layers of a pass."""

    def __init__(self, slot: Tensor, is_token: Tensor) -> None:
        """Point to buffers of the device, which whoever advances the texts writes to.

        Args:
            slot: [1], int64, the slot of the newest token; the same in all rows.
            is_token: [b, slots], bool, False for the padding of prompts; of slots behind ``slot`` it does not matter.
        """
        self.slot = slot
        self.num_keys = is_token.shape[1]
        """How many slots a query looks at."""
        self._is_token = is_token
        self._made: dict[Hashable, Tensor] = {}

    def additive_mask(self, window: int | None, alibi: Alibi | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, made once in a pass for all layers of a kind: [b, np or 1, 1, slots].

        Args:
            window: How many tokens back, itself included, a token sees; None for all.
            alibi: Whose linear biases are added; None for none.
            dtype: Of the queries.
        """
        key = (window, alibi, dtype)
        if key not in self._made:
            slots = torch.arange(self.num_keys, device=self.slot.device)
            hidden = ~self._is_token | (slots > self.slot)
            if window is not None:
                hidden = hidden | (slots <= self.slot - window)
            bias = None
            if alibi is not None:
                biases = masks.key_biases(alibi, self._is_token, self.num_keys, hidden.device)
                # Relative to the query, whose key is at ``slot``: near keys get small numbers, as in ``relative``.
                bias = (biases - biases.index_select(-1, self.slot))[:, :, None]
            self._made[key] = masks.additive_mask(hidden[:, None, None], bias, dtype)
        return self._made[key]
