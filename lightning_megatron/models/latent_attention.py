"""Multi-head latent attention: one latent vector of a token holds the keys and values of all heads.

DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1. A head's queries and keys are of two parts: one from
latents, without positions, and one with rotary positions, whose key is the same for all heads.

Modules and weights have the names and the order of megatron-core 0.16.1, transformer/multi_latent_attention.py. Its own
``MLASelfAttention`` is not used: it computes rotary angles itself, for positions 0, 1, 2, ... and two of the scalings,
has no biases, gathers hidden states for its first projections, and caches latents for Transformer Engine's linears
alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from torch import Tensor

from lightning_megatron.engine.ops.key_value_cache import LatentCache
from lightning_megatron.engine.ops.norms import Norm
from lightning_megatron.engine.ops.partial_rotary import rotate_last
from lightning_megatron.engine.ops.replicated_linear import ReplicatedLinear
from lightning_megatron.models.adapter_names import ADAPTER_SUFFIX
from lightning_megatron.models.config import LatentAttention


class LatentSelfAttention(Attention):
    """Self-attention with keys and values from latents.

    Attributes:
        linear_q_proj: Queries of the hidden states, if there is no latent of queries.
        linear_q_down_proj: Latent of queries, of the hidden states.
        linear_q_up_proj: Queries of their latent.
        linear_kv_down_proj: Latent of keys and values, and the keys with positions.
        linear_kv_up_proj: Keys without positions, and values, of each head.
        q_layernorm: Norm of the latent of queries.
        kv_layernorm: Norm of the latent of keys and values.
    """

    def __init__(
        self,
        *,
        latent: LatentAttention,
        attention_factor: float,
        **kwargs: Any,
    ) -> None:
        """Create the attention; ``ModuleSpec.params`` has the arguments that are not Megatron's.

        Args:
            latent: Widths.
            attention_factor: Multiplier of sines and cosines.
            kwargs: Megatron's.
        """
        super().__init__(attention_type="self", **kwargs)
        config = self.config
        self.latent = latent
        self.attention_factor = attention_factor
        hidden = config.hidden_size
        heads = config.num_attention_heads
        down = partial(ReplicatedLinear, config=config, bias=latent.add_bias)
        norm = partial(Norm, config, eps=latent.norm_epsilon)
        up = partial(
            ColumnParallelLinear,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        query_size = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
        if latent.q_lora_rank is None:
            self.linear_q_proj = up(hidden, query_size)
        else:
            self.linear_q_down_proj = down(hidden, latent.q_lora_rank)
            self.q_layernorm = norm(hidden_size=latent.q_lora_rank)
            self.linear_q_up_proj = up(latent.q_lora_rank, query_size)
        self.linear_kv_down_proj = down(hidden, latent.cached_width)
        self.kv_layernorm = norm(hidden_size=latent.kv_lora_rank)
        self.linear_kv_up_proj = up(
            latent.kv_lora_rank,
            heads * (latent.qk_head_dim + latent.v_head_dim),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention. Collective over the tp and cp groups.

        Args:
            hidden_states: [s/cp or s/cp/tp, b, h].
            attention_mask: As for the core attention.
            rotary_pos_emb: Angles, [s/cp, 1 or b, 1, qk_pos_emb_head_dim].
            kwargs: Megatron-Core's arguments for inference and other kinds of positions; None.

        Returns:
            Hidden states of the same shape, and the bias of the output projection, which is not added.
        """
        assert rotary_pos_emb is not None, "latent attention has rotary positions"
        if self.core_attention.kv_cache is not None:
            return self._attend_cached(hidden_states, attention_mask, rotary_pos_emb)
        query, key, value = self.get_query_key_value_tensors(hidden_states, rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            attended = checkpoint(self.core_attention, False, query, key, value, attention_mask)
        else:
            attended = self.core_attention(query, key, value, attention_mask)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _attend_cached(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        angles: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to cached latents, and to those of ``hidden_states``; arguments as for ``forward``."""
        cache = self.core_attention.kv_cache
        assert isinstance(cache, LatentCache)
        query = self._queries(hidden_states, angles)
        latents, rotated = self._latents(hidden_states, angles)
        new = torch.cat((latents[:, :, None], rotated), dim=-1)
        cached = cache.extend(new.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
        if len(query) == 1:
            attended = self._attend_to_latents(query, cached, attention_mask)
        else:
            latents = cached[:, :, 0, : self.latent.kv_lora_rank]
            rotated = cached[..., self.latent.kv_lora_rank :]
            key, value = self._expand(latents, rotated)
            attended = self.core_attention(query, key, value, attention_mask)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _attend_to_latents(
        self,
        query: Tensor,
        cached: Tensor,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Attention of one query to latents, the keys and values of all heads: [1, b, np/tp * v_head_dim].

        The matrices that would make keys and values of latents are applied to the query and to the output instead
        (arXiv 2405.04434, section 2.1.2).

        Args:
            query: [1, b, np/tp, qk_head_dim + qk_pos_emb_head_dim].
            cached: Latents and rotated keys, [s, b, 1, kv_lora_rank + qk_pos_emb_head_dim].
            attention_mask: As for the core attention.
        """
        plain = query[..., : self.latent.qk_head_dim]
        rotary = query[..., self.latent.qk_head_dim :]
        of_keys, of_values = self._up_projections()
        absorbed = torch.einsum("sbnd,ndr->sbnr", plain, of_keys)
        mixed = self.core_attention(
            torch.cat((absorbed, rotary), dim=-1),
            cached,
            cached[..., : self.latent.kv_lora_rank],
            attention_mask,
        )
        heads = mixed.unflatten(2, (query.shape[2], -1))
        values = torch.einsum("sbnr,nvr->sbnv", heads, of_values)
        return values.flatten(2)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Matrices of this rank's heads that make keys and values of latents: [np/tp, ..., kv_lora_rank] each."""
        weight = self.linear_kv_up_proj.weight
        adapter = getattr(self, "linear_kv_up_proj" + ADAPTER_SUFFIX, None)
        if adapter is not None:
            weight = (weight.float() + adapter.delta()).to(weight.dtype)
        heads = weight.unflatten(0, (self.num_attention_heads_per_partition, -1))
        widths = (self.latent.qk_head_dim, self.latent.v_head_dim)
        of_keys, of_values = heads.split(widths, dim=1)
        return of_keys, of_values

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        rotary_pos_emb: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, [s/cp, b, np/tp, qk_head_dim + qk_pos_emb_head_dim], and values, [.., v_head_dim]."""
        query = self._queries(hidden_states, rotary_pos_emb)
        latents, rotated = self._latents(hidden_states, rotary_pos_emb)
        key, value = self._expand(latents, rotated)
        return query, key, value

    def _queries(self, hidden_states: Tensor, angles: Tensor) -> Tensor:
        """Queries of this rank's heads, [s/cp, b, np/tp, qk_head_dim + qk_pos_emb_head_dim]."""
        latent = self.latent
        if latent.q_lora_rank is None:
            mixed, _ = self.linear_q_proj(hidden_states)
        else:
            of_queries, _ = self.linear_q_down_proj(hidden_states)
            mixed, _ = self.linear_q_up_proj(self.q_layernorm(of_queries))
        heads = mixed.unflatten(2, (self.num_attention_heads_per_partition, -1))
        return self._rotate(heads, angles)

    def _latents(self, hidden_states: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized latents, [s/cp or s/cp/tp, b, kv_lora_rank], and rotated keys, [s/cp, b, 1, ...]."""
        mixed, _ = self.linear_kv_down_proj(hidden_states)
        widths = (self.latent.kv_lora_rank, self.latent.qk_pos_emb_head_dim)
        latents, rotary = mixed.split(widths, dim=-1)
        # Each rank has the keys of its own heads, which are the same: their gradients are summed over tp.
        if self.config.sequence_parallel:
            rotary = gather_from_sequence_parallel_region(rotary, group=self.tp_group)
        else:
            rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        return self.kv_layernorm(latents), self._rotate(rotary[:, :, None], angles)

    def _expand(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's heads: [s/cp, b, np/tp, ...]."""
        latent = self.latent
        mixed, _ = self.linear_kv_up_proj(latents)
        heads = mixed.unflatten(2, (self.num_attention_heads_per_partition, -1))
        plain, value = heads.split((latent.qk_head_dim, latent.v_head_dim), dim=-1)
        shared = rotated.expand(-1, -1, heads.shape[2], -1)
        return torch.cat((plain, shared), dim=-1), value

    def _rotate(self, heads: Tensor, angles: Tensor) -> Tensor:
        """Rotate the last dimensions of queries or of the keys that all heads share."""
        return rotate_last(
            heads,
            angles,
            factor=self.attention_factor,
            interleaved=self.config.rotary_interleaved,
        )
