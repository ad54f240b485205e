"""Model chunk of T5: a slice of the joint stack of encoder layers and decoder layers, for pipeline parallelism.

Chunks send each other one tensor, the encoder's hidden states followed by the decoder's along the sequence, so that
Megatron-Core's schedules run unchanged with a sequence of s_enc + s_dec; a chunk passes on states that it does not
change. megatron-core 0.16.1 has no pipeline parallelism for its own T5 (pretrain_t5.py refuses it), but its transformer
blocks can be split anywhere: each of the two stacks has a config with its own ``pipeline_model_parallel_layout``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from lightning_megatron.engine.ops.context import ContextParallel
from lightning_megatron.engine.ops.masks import MASKED_SCORE
from lightning_megatron.engine.ops.random_state import forked
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.engine.shared_weights import SharedWeights, mark_shared_weight
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import Chunk
from lightning_megatron.models.layers import LayerStack, block_spec
from lightning_megatron.models.t5_layout import OVERRIDE, layer_ranges, t5_layout
from lightning_megatron.models.transformer_config import transformer_config

_ALIGNMENT = 16
"""Rows of scores are padded to a multiple of this; otherwise the memory-efficient attention kernel copies them."""


def t5_chunks(model: ModelConfig, settings: EngineSettings) -> Callable[[int | None], Chunk]:
    """Return a function that creates the chunk of a virtual stage.

    ``transformer_config_overrides={"pipeline_model_parallel_layout": [2, 5]}`` sets how many layers of the joint stack
    each chunk holds; by default they are balanced by cost.

    Raises:
        ConfigError: If the model does not support ``settings``.
    """
    overrides = dict(settings.overrides.transformer)
    layout = t5_layout(model, settings.parallel, overrides.pop(OVERRIDE, None))
    config = transformer_config(
        model,
        replace(settings, overrides=replace(settings.overrides, transformer=overrides)),
    )
    return partial(T5Chunk, model, config, layer_ranges(model.num_layers, layout))


class T5Chunk(Chunk):
    """One chunk; ``encoder`` and ``decoder`` hold its layers of either stack, possibly none."""

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        layers: list[tuple[range, range]],
        vp_stage: int | None,
    ) -> None:
        """Create this rank's layers.

        Args:
            model: The model's config.
            config: Megatron's config of it.
            layers: Encoder and decoder layers of each chunk, in pipeline order.
            vp_stage: Virtual pipeline stage; None without virtual stages.
        """
        super().__init__(model, config, vp_stage)
        number = (vp_stage or 0) * self.pp_group.size() + self.pp_group.rank()
        encoder_layers, _ = layers[number]
        self._output_scale: float | None = None
        if model.scale_decoder_outputs:
            self._output_scale = model.hidden_size**-0.5
        self._input_tensor: Tensor | None = None
        stack = partial(T5Stack, model, config, vp_stage)
        self.encoder = stack(
            [len(encoder) for encoder, _ in layers],
            is_decoder=False,
            has_final_norm=model.num_layers - 1 in encoder_layers,
        )
        self.decoder = stack(
            [len(decoder) for _, decoder in layers],
            is_decoder=True,
            has_final_norm=self.post_process,
        )
        if config.recompute_method == "block":
            # recompute_num_layers counts encoder and decoder layers of a chunk.
            self.decoder.config.recompute_num_layers -= len(self.encoder.layers)
        if len(layers) > 1:
            for stack in (self.encoder, self.decoder):
                if stack.relative_bias is not None:
                    mark_shared_weight(stack.relative_bias.weight, is_owner=stack.first_layer == 0)
        self.create_output_layer()

    def shared_weights(self) -> SharedWeights:
        """Return the relative position tables; each chunk with layers of a stack has a copy of its table."""
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        return SharedWeights(
            shape=(self.description.relative_attention_num_buckets, heads),
            weights={
                "encoder": self.encoder.relative_table,
                "decoder": self.decoder.relative_table,
            },
        )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Set the previous chunk's output: [s_enc + s_dec or a shard of it, b, h]."""
        if isinstance(input_tensor, list):
            input_tensor = input_tensor[0]
        self._input_tensor = input_tensor

    def forward(
        self,
        encoder_ids: Tensor,
        decoder_ids: Tensor,
        encoder_mask: Tensor | None = None,
        decoder_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        runtime_gather_output: bool | None = None,
    ) -> Tensor:
        """Run this chunk. Collective over the tp and cp groups; every chunk needs the same arguments.

        Args:
            encoder_ids: [b, s_enc] int64; s_enc is 0 once cross-attention has cached the encoder's keys and values.
            decoder_ids: [b, s_dec] int64.
            encoder_mask: [b, s_enc], 0 for padding; None without padding.
            decoder_mask: [b, s_dec], 0 for padding; None without. Decoder self-attention is causal besides.
            labels: [b, s_dec] int64; None for logits.
            runtime_gather_output: Whether to all-gather logits over the tp group.

        Returns:
            On the last chunk per-token losses, [b, s_dec] fp32, or logits, [b, s_dec, v/tp or v]; before it hidden
            states of encoder and decoder, [s_enc + s_dec or a shard of it, b, h].
        """
        encoder, decoder = self._inputs(encoder_ids, decoder_ids)
        if encoder.shape[0] > 0:
            encoder = self.encoder(encoder, encoder_mask)
        decoder = self.decoder(decoder, decoder_mask, encoder, encoder_mask)
        if not self.post_process:
            # A new tensor, not a view: the schedule frees its storage after sending it.
            return torch.cat([encoder, decoder])
        if self._output_scale is not None:
            decoder = decoder * self._output_scale
        return self.predictions(decoder, labels, runtime_gather_output)

    def _inputs(
        self,
        encoder_ids: Tensor,
        decoder_ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self.pre_process:
            # Two look-ups: sequence parallelism scatters encoder and decoder separately.
            encoder = None
            if encoder_ids.shape[1] > 0:
                encoder = self.embedding(self.own_tokens(encoder_ids), None)
            decoder = self.embedding(self.own_tokens(decoder_ids), None)
            if encoder is None:
                encoder = decoder[:0]
            return encoder, decoder
        assert self._input_tensor is not None, (
            "the schedule sets the input of every chunk but the first"
        )
        shards = _num_sequence_shards(self.config)
        lengths = [ids.shape[1] // shards for ids in (encoder_ids, decoder_ids)]
        encoder, decoder = self._input_tensor.split(lengths)
        return encoder, decoder


class T5Stack(LayerStack):
    """Consecutive layers of encoder or decoder, with relative position bias and, after the last one, the final norm."""

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        vp_stage: int | None,
        layout: list[int],
        *,
        is_decoder: bool,
        has_final_norm: bool,
    ) -> None:
        """Create the layers.

        Args:
            model: The model's config.
            config: Megatron's config of it.
            vp_stage: Virtual pipeline stage; None without virtual stages.
            layout: Number of layers of this stack in each chunk.
            is_decoder: Whether this is the decoder.
            has_final_norm: Whether the stack's final norm is in this chunk.
        """
        config = copy.copy(config)
        config.num_layers = sum(layout)
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            [["decoder"] * count for count in layout], config.pipeline_model_parallel_size
        )
        spec = block_spec(model, config, vp_stage, has_cross_attention=is_decoder)
        super().__init__(config, spec, post_process=has_final_norm, vp_stage=vp_stage)
        self.first_layer = get_transformer_layer_offset(config, vp_stage)
        """Number of this chunk's first layer in the full stack, from 0."""
        self.relative_bias: RelativeBias | None = None
        if len(self.layers) > 0:
            self.relative_bias = RelativeBias(model, config, bidirectional=not is_decoder)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the layers, and the final norm with its dropout if it is in this chunk.

        Args:
            hidden: [s or s/tp, b, h].
            attention_mask: [b, s], 0 for padding; None without padding.
            context: Encoder output for the decoder, [s_enc or s_enc/tp, b, h].
            context_mask: [b, s_enc], 0 for padding; None without padding.
        """
        bias = None
        if self.relative_bias is not None:
            length = hidden.shape[0] * _num_sequence_shards(self.config)
            bias = self.relative_bias(self._num_cached() + length, attention_mask, length)
        hidden = super().forward(hidden, bias, context, context_mask)
        if self.final_layernorm is None:
            return hidden
        # With sequence parallelism each rank draws its own dropout mask, as in Megatron's TransformerBlock.
        forks = self.config.sequence_parallel
        with forked(forks):
            return F.dropout(hidden, self.config.hidden_dropout, self.training)

    @property
    def relative_table(self) -> torch.nn.Parameter | None:
        """Weight of ``relative_bias``; None if the chunk has no layers of this stack."""
        return None if self.relative_bias is None else self.relative_bias.weight

    def _num_cached(self) -> int:
        """Number of tokens in the KV cache, which is in use during generation only."""
        cache = self.layers[0].self_attention.core_attention.kv_cache
        return 0 if cache is None else cache.length

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return Megatron-Core's sharded state dict, with the relative position table saved by its first chunk only."""
        state: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.relative_bias is not None:
            # In Megatron-Core's own T5 the table is not part of the stack.
            key = f"{prefix.removesuffix('.')}_relative_pos_emb.relative_attention_bias.weight"
            table = make_tp_sharded_tensor_for_checkpoint(self.relative_bias.weight, key, tp_axis=1)
            table.replica_id = (self.first_layer, *table.replica_id[1:])
            state[f"{prefix}relative_bias.weight"] = table
        return state


def _num_sequence_shards(config: TransformerConfig) -> int:
    """Number of equal shards that the cp and tp groups split hidden states into along the sequence."""
    shards: int = config.context_parallel_size
    if config.sequence_parallel:
        shards *= config.tensor_model_parallel_size
    return shards


# ---- relative positions ----------------------------------------------------------------------------------------------


class RelativeBias(MegatronModule):
    """Relative position bias of one stack, with the columns of this rank's heads: weight [num_buckets, heads/tp].

    Half of the buckets are single distances, the others ranges that grow geometrically up to ``max_distance``; in a
    bidirectional stack each direction has half of the buckets. Source: Raffel et al. 2020, arXiv 1910.10683, section
    2.1, as implemented by Megatron-Core, which rounds as Hugging Face's T5.

    Sharded over tp, not replicated: its gradient needs no all-reduce over tp, and the gradient norm counts it once.
    """

    buckets: Tensor
    """[2 * max_distance + 1], int64: bucket of each distance between key and query, from -max_distance on."""

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        *,
        bidirectional: bool,
    ) -> None:
        """Create the table.

        Args:
            model: The model's config.
            config: Megatron's config of it.
            bidirectional: Whether keys to the right of the query have buckets of their own (encoder).
        """
        super().__init__(config=config)
        num_buckets = model.relative_attention_num_buckets
        max_distance = model.relative_attention_max_distance
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(
            torch.empty(
                num_buckets,
                heads,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )
        set_tensor_model_parallel_attributes(self.weight, True, 1, 1)
        # The module itself would look up all queries, without context parallelism and masks. This method needs no self.
        bucket_of: Any = RelativePositionEmbedding._relative_position_bucket
        distances = torch.arange(-max_distance, max_distance + 1)
        buckets = bucket_of(None, distances, bidirectional, num_buckets, max_distance)
        self.register_buffer(
            "buckets",
            buckets.to(self.weight.device),
            persistent=False,
        )

    def forward(
        self,
        length: int,
        attention_mask: Tensor | None,
        queries: int,
    ) -> Tensor:
        """Compute the additive bias of the scores, masked keys included; without ``bidirectional`` it is causal.

        Args:
            length: Sequence length s.
            attention_mask: [b, s], 0 for padding; None without padding.
            queries: Number of queries, the last tokens of the sequence; the keys before them are cached.

        Returns:
            [b or 1, heads/tp, queries, s] in the weight's dtype; at cp > 1 this rank's heads or queries of it. Computed
            once per chunk: all layers of the stack in it keep the same tensor for their backward passes.
        """
        padded_length = -(-length // _ALIGNMENT) * _ALIGNMENT
        positions = torch.arange(padded_length, device=self.weight.device)
        distances = positions - positions[length - queries : length, None]
        distances = distances.clamp(-self.max_distance, self.max_distance)
        buckets = self.buckets[distances + self.max_distance]
        context = ContextParallel(self.config)
        weight = context.own_heads(self.weight, 1)
        values = F.embedding(context.own_queries(buckets, 0), weight)
        bias = values.permute(2, 0, 1)[None].contiguous()
        mask = None
        if not self.bidirectional and queries > 1:
            everywhere = torch.ones_like(buckets, dtype=torch.bool)
            later = everywhere.triu(1 + length - queries)
            mask = context.own_queries(later[None, None], 2)
        if attention_mask is not None:
            padding = F.pad(attention_mask == 0, (0, padded_length - length))
            padding = padding[:, None, None, :]
            mask = padding if mask is None else mask | padding
        if mask is not None:
            # Overwritten, not added: a large bias must not unmask a key.
            bias = bias.masked_fill(mask, MASKED_SCORE)
        return bias[..., :length]
