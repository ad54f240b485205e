"""The gated delta rule: attention as a recurrence over tokens, computed in chunks by matrix products.

Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464), section 3. A head's state S, [keys, values], is, for each token::

    S = a S;  S = S + k (b (v - k S))^T;  output = q S

with a decay a = exp(g) and a rate b, and normalized q and k. Within a chunk all updates are a triangular system (the WY
representation of section 3.3): with inclusive sums G of g, D_ij = exp(G_i - G_j) and T the inverse of 1 + the strictly
lower triangle of b_i (k_i k_j) D_ij, tokens write U - W S for U = T (b v), W = T (b exp(G) k), and S is the state
before the chunk. From chunk to chunk the state is multiplied by a matrix, and something is added: a linear recurrence,
with one matrix product for each chunk. All else is computed for all chunks at once.

Documents of a row do not see each other: the decay between tokens of two documents is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.unit_lower_inverse import unit_lower_inverse

CHUNK = 64
"""Tokens of a chunk."""
_NORM_EPSILON = 1e-6
"""Added to the squared norms of queries and keys, as in flash-linear-attention and transformers."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by the gated delta rule; matrix products are in the dtype of ``value``, states in fp32.

    Args:
        query: [s, b, hk, dk], not normalized.
        key: [s, b, hk, dk], not normalized.
        value: [s, b, hv, dv]; hk divides hv, and consecutive heads share one of keys.
        log_decay: [s, b, hv], fp32, at most 0.
        rate: [s, b, hv], fp32, from 0 to 1.
        documents: [s, b], numbers of the documents of a row, which do not decrease; None for one.
        state: [b, hv, dk, dv], fp32, before the first token; None for zeros.

    Returns:
        Outputs, [s, b, hv, dv], and the state after the last token, [b, hv, dk, dv], fp32.
    """
    length, rows, heads, width = value.shape
    if state is None:
        state = value.new_zeros(rows, heads, key.shape[3], width, dtype=torch.float32)
    if length == 1:
        return _one_token(query, key, value, log_decay, rate, state)
    chunks: _Chunks = compiled_for(value, _within_chunks)(
        query, key, value, log_decay, rate, documents
    )
    inverse = unit_lower_inverse(chunks.system).to(chunks.scores.dtype)
    written = inverse @ chunks.values
    reading = inverse @ chunks.reading_keys
    writing = chunks.writing_keys.mT
    states, last = scan_states(
        writing @ reading,
        chunks.carried,
        writing @ written,
        state.flatten(0, 1),
    )
    of_tokens = written - reading @ states
    output = chunks.reading_queries @ states + chunks.scores @ of_tokens
    in_rows = output.unflatten(1, (rows, heads)).permute(0, 3, 1, 2, 4)
    return in_rows.flatten(0, 1)[:length].to(value.dtype), last.unflatten(0, (rows, heads))


class _Chunks(NamedTuple):
    """What each chunk needs of its own tokens; n chunks of b * hv heads, and their C tokens."""

    system: Tensor
    """[n, b * hv, C, C], fp32, strictly lower: how much of its update a token takes from earlier ones."""
    scores: Tensor
    """[n, b * hv, C, C], lower: products of queries and keys, with the decay between them."""
    values: Tensor
    """[n, b * hv, C, dv], times their rates."""
    reading_keys: Tensor
    """[n, b * hv, C, dk], times their rates and the decay from the chunk's beginning."""
    reading_queries: Tensor
    """[n, b * hv, C, dk], times the decay from the chunk's beginning."""
    writing_keys: Tensor
    """[n, b * hv, C, dk], times the decay to the chunk's end."""
    carried: Tensor
    """[n, b * hv], fp32: what remains of the state from one chunk to the next."""


def _within_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    documents: Tensor | None,
) -> _Chunks:
    # In fp16 the states could overflow.
    dtype = torch.float32 if value.dtype is torch.float16 else value.dtype
    repeats = value.shape[2] // key.shape[2]
    scale = key.shape[3] ** -0.5
    queries = _in_chunks((_normalized(query) * scale).to(dtype).repeat_interleave(repeats, dim=2))
    keys = _in_chunks(_normalized(key).to(dtype).repeat_interleave(repeats, dim=2))
    rates = _in_chunks(rate)[..., None]
    sums = _in_chunks(log_decay).cumsum(-1)
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    reads = sums.exp()
    writes = (sums[..., -1:] - sums).exp()
    if documents is not None:
        of_tokens = _documents_in_chunks(documents, value.shape[2])
        before = torch.cat((of_tokens[:1, :, :1], of_tokens[:-1, :, -1:]))
        hidden = hidden | (of_tokens[..., :, None] != of_tokens[..., None, :])
        reads = reads * (of_tokens == before)
        writes = writes * (of_tokens == of_tokens[..., -1:])
    differences = sums[..., :, None] - sums[..., None, :]
    # Not after the exponential, which is infinite where the difference is large.
    decays = differences.masked_fill(hidden, -torch.inf).exp()
    system = (keys @ keys.mT).float() * decays * rates
    scores = (queries @ keys.mT).float() * decays
    return _Chunks(
        system=system.tril(-1),
        scores=scores.to(dtype),
        values=(_in_chunks(value) * rates).to(dtype),
        reading_keys=(keys * (rates * reads[..., None])).to(dtype),
        reading_queries=(queries * reads[..., None]).to(dtype),
        writing_keys=(keys * writes[..., None]).to(dtype),
        carried=reads[..., -1],
    )


def _normalized(x: Tensor) -> Tensor:
    """x, [..., d], divided by its norm, fp32."""
    wide = x.float()
    squares = (wide * wide).sum(-1, keepdim=True)
    return wide * torch.rsqrt(squares + _NORM_EPSILON)


def _in_chunks(x: Tensor) -> Tensor:
    """[s, b, h, ...] as [n, b * h, C, ...], with zeros after the last token."""
    missing = -len(x) % CHUNK
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
    chunks: Tensor = padded.unflatten(0, (-1, CHUNK))
    return chunks.movedim(1, 3).flatten(1, 2)


def _documents_in_chunks(documents: Tensor, heads: int) -> Tensor:
    """Documents of tokens, [s, b], as [n, b * h, C]; what is after the last token belongs to its document."""
    missing = -len(documents) % CHUNK
    padded = torch.cat((documents, documents[-1:].expand(missing, -1)))
    chunks: Tensor = padded.unflatten(0, (-1, CHUNK))
    in_chunks = chunks.movedim(1, 2)
    return in_chunks.repeat_interleave(heads, dim=1)


# ---- from chunk to chunk ---------------------------------------------------------------------------------------------


def scan_states(
    overlaps: Tensor,
    carried: Tensor,
    added: Tensor,
    initial: Tensor,
) -> tuple[Tensor, Tensor]:
    """States S of the recurrence S = (carried - overlaps) S + added, computed in fp32.

    Args:
        overlaps: [n, h, dk, dk].
        carried: [n, h], fp32.
        added: [n, h, dk, dv].
        initial: [h, dk, dv], fp32.

    Returns:
        The state before each step, [n, h, dk, dv], in the dtype of ``added``, and the last one, [h, dk, dv], fp32.
    """
    states, last = _Scan.apply(overlaps, carried, added, initial)  # type: ignore[no-untyped-call]
    return states, last


class _Scan(torch.autograd.Function):
    """The backward pass is the same recurrence from the last step to the first, with the transposed matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        overlaps: Tensor,
        carried: Tensor,
        added: Tensor,
        initial: Tensor,
    ) -> tuple[Tensor, Tensor]:
        matrices = compiled_for(overlaps, _transitions)(overlaps, carried)
        all_states = initial.new_empty(len(added) + 1, *initial.shape)
        all_states[0] = initial
        all_states[1:] = added
        each = all_states.unbind()
        for step, matrix in enumerate(matrices.unbind()):
            each[step + 1].baddbmm_(matrix, each[step])
        # Not views: autograd takes no views of one tensor for two outputs.
        states = all_states[:-1].to(added.dtype, copy=True)
        ctx.save_for_backward(overlaps, carried, states)
        return states, all_states[-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        overlaps, carried, states = ctx.saved_tensors
        of_states, of_last = gradients
        matrices = compiled_for(overlaps, _transitions)(overlaps, carried)
        all_gradients = of_last.new_empty(len(of_states) + 1, *of_last.shape)
        all_gradients[:-1] = of_states
        all_gradients[-1] = of_last
        each = all_gradients.unbind()
        transposed = matrices.mT.unbind()
        for step in range(len(transposed) - 1, -1, -1):
            each[step].baddbmm_(transposed[step], each[step + 1])
        of_added = all_gradients[1:].to(states.dtype)
        of_overlaps = -(of_added @ states.mT)
        of_carried = compiled_for(states, _sum_of_products)(all_gradients[1:], states)
        return of_overlaps.to(overlaps.dtype), of_carried, of_added, all_gradients[0]


def _transitions(overlaps: Tensor, carried: Tensor) -> Tensor:
    """Matrices of the recurrence, [n, h, dk, dk], fp32."""
    return torch.diag_embed(carried[..., None].expand(overlaps.shape[:-1])) - overlaps.float()


def _sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Sum over the last two axes, fp32."""
    return (one.float() * other.float()).sum((-2, -1))


# ---- generation ------------------------------------------------------------------------------------------------------


def _one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The recurrence itself; arguments as for ``gated_delta_rule``, of one token."""
    repeats = value.shape[2] // key.shape[2]
    scale = key.shape[3] ** -0.5
    q = (_normalized(query[0]) * scale).repeat_interleave(repeats, dim=1)[..., None, :]
    k = _normalized(key[0]).repeat_interleave(repeats, dim=1)[..., None, :]
    decayed = state * log_decay[0].exp()[..., None, None]
    missing = value[0].float()[..., None, :] - k @ decayed
    updated = decayed + k.mT * (rate[0][..., None, None] * missing)
    output = q @ updated
    return output[None, ..., 0, :].to(value.dtype), updated
