"""One pipeline chunk of a T5: parts of one joint stack, the encoder's layers followed by the decoder's.

Between chunks travels one tensor, the encoder's hidden states followed by the decoder's along the sequence, so that
Megatron-Core's schedules run unchanged with a sequence of s_enc + s_dec; what a chunk does not work on passes through.
megatron-core 0.16.1 has no pipeline for its own T5 (pretrain_t5.py refuses it), but its blocks of layers can be cut
anywhere: each of the two stacks has a config with its own ``pipeline_model_parallel_layout``.
"""

from __future__ import annotations

import contextlib
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
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from lightning_megatron.engine.fillers.context import ContextParallel
from lightning_megatron.engine.fillers.masks import MASKED_SCORE
from lightning_megatron.engine.wrap import SharedWeights, mark_shared_weight
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import Chunk
from lightning_megatron.models.layers import LayerStack, block_spec
from lightning_megatron.models.t5_layout import OVERRIDE, layers_per_chunk, t5_layout
from lightning_megatron.models.transformer_config import EngineSettings, transformer_config

_ALIGNMENT = 16
"""Rows of scores start at multiples of this many numbers: the memory-efficient kernel would copy them otherwise."""


def t5_chunks(model: ModelConfig, settings: EngineSettings) -> Callable[[int | None], Chunk]:
    """What makes a chunk of a T5 of its virtual stage.

    ``transformer_config_overrides={"pipeline_model_parallel_layout": [2, 5]}`` says by hand how many layers of the
    joint stack each chunk holds; without it they are balanced by cost.

    Raises:
        ConfigError: If the model cannot be run as ``settings`` say.
    """
    by_hand = dict(settings.overrides.transformer)
    layout = t5_layout(model, settings.parallel, by_hand.pop(OVERRIDE, None))
    config = transformer_config(model, replace(settings, overrides=replace(settings.overrides, transformer=by_hand)))
    return partial(T5Chunk, model, config, layers_per_chunk(model.num_layers, layout))


class T5Chunk(Chunk):
    """One chunk; ``encoder`` and ``decoder`` hold what this chunk has of either, perhaps nothing."""

    def __init__(
        self, model: ModelConfig, config: TransformerConfig, held: list[tuple[range, range]], vp_stage: int | None
    ) -> None:
        """Create this rank's layers.

        Args:
            model: The description.
            config: The same in the engine's words.
            held: What each chunk of the pipeline holds.
            vp_stage: Which virtual stage; None if there is only one.
        """
        super().__init__(model, config, vp_stage)
        own, _ = held[(vp_stage or 0) * self.pp_group.size() + self.pp_group.rank()]
        self._output_scale = model.hidden_size**-0.5 if model.scale_decoder_outputs else None
        self._input_tensor: Tensor | None = None
        stack = partial(T5Stack, model, config, vp_stage)
        encoder, decoder = ([len(numbers) for numbers in layout] for layout in zip(*held, strict=True))
        self.encoder = stack(encoder, is_decoder=False, has_final_norm=model.num_layers - 1 in own)
        self.decoder = stack(decoder, is_decoder=True, has_final_norm=self.post_process)
        if config.recompute_method == "block":  # which counts the layers of a chunk, of whichever stack
            self.decoder.config.recompute_num_layers -= len(self.encoder.layers)
        if len(held) > 1:
            for stack in (self.encoder, self.decoder):
                if stack.relative_bias is not None:
                    mark_shared_weight(stack.relative_bias.weight, is_owner=stack.first == 0)
        self.create_output_layer()

    def shared_weights(self) -> SharedWeights:
        """The tables of relative positions, which every chunk with layers of their stack has."""
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        tables = {"encoder": self.encoder.relative_bias, "decoder": self.decoder.relative_bias}
        return SharedWeights(
            shape=(self.description.relative_attention_num_buckets, heads),
            weights={name: None if table is None else table.weight for name, table in tables.items()},
        )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take what the chunk before sent: [(s_enc + s_dec) or a part, b, h]."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

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
        """Run this chunk; all tensor- and context-parallel ranks must call, and every chunk needs the same arguments.

        Args:
            encoder_ids: [b, s_enc] int64; s_enc is 0 once the decoder's layers have cached what they see
                of the encoder.
            decoder_ids: [b, s_dec] int64.
            encoder_mask: [b, s_enc], 0 where a token is padding; None if none is.
            decoder_mask: [b, s_dec], the same for the decoder, which sees only backwards besides.
            labels: [b, s_dec] int64; None for logits.
            runtime_gather_output: Whether logits are gathered over the tensor-parallel ranks.

        Returns:
            Before the last chunk encoder's and decoder's states, [s_enc + s_dec or a part, b, h]; there the loss of
            each label, [b, s_dec] fp32, or logits, [b, s_dec, v/tp or v].
        """
        encoder, decoder = self._inputs(encoder_ids, decoder_ids)
        if encoder.shape[0] > 0:
            encoder = self.encoder(encoder, encoder_mask)
        decoder = self.decoder(decoder, decoder_mask, encoder, encoder_mask)
        if not self.post_process:
            # A tensor of its own, no view: the schedule frees its storage once it is sent.
            return torch.cat([encoder, decoder])
        if self._output_scale is not None:
            decoder = decoder * self._output_scale
        return self.predictions(decoder, labels, runtime_gather_output)

    def _inputs(self, encoder_ids: Tensor, decoder_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.pre_process:
            # Two look-ups: under sequence parallelism each part is scattered on its own.
            encoder = self.embedding(self.own_tokens(encoder_ids), None) if encoder_ids.shape[1] > 0 else None
            decoder = self.embedding(self.own_tokens(decoder_ids), None)
            return decoder[:0] if encoder is None else encoder, decoder
        assert self._input_tensor is not None, "the schedule sets the input of every chunk but the first"
        shards = _parts_of_sequence(self.config)
        lengths = [ids.shape[1] // shards for ids in (encoder_ids, decoder_ids)]
        encoder, decoder = self._input_tensor.split(lengths)
        return encoder, decoder


class T5Stack(LayerStack):
    """Some neighbouring layers of the encoder or of the decoder, and what belongs to them."""

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
            model: The description.
            config: The same in the engine's words.
            vp_stage: Which virtual stage; None if there is only one.
            layout: How many layers of this stack each chunk holds.
            is_decoder: Which of the two stacks.
            has_final_norm: Whether the stack's last norm stands here.
        """
        config = copy.copy(config)
        config.num_layers = sum(layout)
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            [["decoder"] * count for count in layout], config.pipeline_model_parallel_size
        )
        spec = block_spec(model, config, vp_stage, has_cross_attention=is_decoder)
        super().__init__(config, spec, post_process=has_final_norm, vp_stage=vp_stage)
        self.first = get_transformer_layer_offset(config, vp_stage)
        """Which layer of the whole stack is the first one here, from 0."""
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
        """Run the layers, and the final norm with its dropout if it is here.

        Args:
            hidden: [s or s/tp, b, h].
            attention_mask: [b, s], 0 where a token is padding; None if none is.
            context: What the encoder returned, [s_enc or s_enc/tp, b, h]; for the decoder.
            context_mask: [b, s_enc], as ``attention_mask``.
        """
        bias = None
        if self.relative_bias is not None:
            length = hidden.shape[0] * _parts_of_sequence(self.config)
            bias = self.relative_bias(self._num_cached() + length, attention_mask, length)
        hidden = super().forward(hidden, bias, context, context_mask)
        if self.final_layernorm is None:
            return hidden
        # With sequence parallelism each rank drops numbers of its own, as in Megatron's TransformerBlock.
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else contextlib.nullcontext():
            return F.dropout(hidden, self.config.hidden_dropout, self.training)

    def _num_cached(self) -> int:
        """How many tokens the layers have read before, whose keys and values they keep while text is generated."""
        cache = self.layers[0].self_attention.core_attention.kv_cache
        return 0 if cache is None else cache.length

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """As Megatron-Core's; of the table of relative positions the first chunk's copy is written."""
        state: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.relative_bias is not None:
            # Megatron-Core's own T5 has the table beside the stack.
            key = f"{prefix.removesuffix('.')}_relative_pos_emb.relative_attention_bias.weight"
            table = make_tp_sharded_tensor_for_checkpoint(self.relative_bias.weight, key, tp_axis=1)
            table.replica_id = (self.first, *table.replica_id[1:])
            state[f"{prefix}relative_bias.weight"] = table
        return state


def _parts_of_sequence(config: TransformerConfig) -> int:
    """Into how many equal parts the ranks of the cp and tp groups split hidden states."""
    shards: int = config.context_parallel_size
    return shards * config.tensor_model_parallel_size if config.sequence_parallel else shards


# ---- relative positions ----------------------------------------------------------------------------------------------


class RelativeBias(MegatronModule):
    """One stack's table, the columns of this rank's heads: weight [num_buckets, heads/tp].

    Half of its rows stand for one distance each, the others for ranges that grow in geometric progression up to
    ``max_distance``; in both directions each has half of all rows. Source: Raffel et al. 2020, arXiv 1910.10683,
    section 2.1, by Megatron-Core, which rounds as Hugging Face's T5.

    Split, not copied: its gradient needs no sum over tp, and the gradient norm counts each number once.
    """

    buckets: Tensor
    """[2 * max_distance + 1], int64: the row of each distance between key and query, from -max_distance on."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, *, bidirectional: bool) -> None:
        """Create the table.

        Args:
            model: The description.
            config: The same in the engine's words.
            bidirectional: Whether keys to the right of the query have rows of their own (in encoders).
        """
        super().__init__(config=config)
        num_buckets, max_distance = model.relative_attention_num_buckets, model.relative_attention_max_distance
        self.max_distance, self.bidirectional = max_distance, bidirectional
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(
            torch.empty(num_buckets, heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        set_tensor_model_parallel_attributes(self.weight, True, 1, 1)
        # Its module would gather the table for all queries, without context parallelism and masks; this needs no self.
        bucket_of: Any = RelativePositionEmbedding._relative_position_bucket
        distances = torch.arange(-max_distance, max_distance + 1)
        buckets = bucket_of(None, distances, bidirectional, num_buckets, max_distance)
        self.register_buffer("buckets", buckets.to(self.weight.device), persistent=False)

    def forward(self, length: int, attention_mask: Tensor | None, queries: int) -> Tensor:
        """What is added to the scores, hidden keys included; in one direction, keys to the right are hidden.

        Args:
            length: Tokens s of the sequence.
            attention_mask: [b, s], 0 where a key is padding; None if none is.
            queries: How many of the last tokens are queries; the keys before them are cached.

        Returns:
            [b or 1, heads/tp, queries, s] in the weight's dtype, at cp > 1 of the heads or queries that this rank
            attends with. It is made once for all layers of a chunk, which then keep one and the same tensor for their
            backward passes.
        """
        places = torch.arange(-(-length // _ALIGNMENT) * _ALIGNMENT, device=self.weight.device)
        distances = places - places[length - queries : length, None]
        buckets = self.buckets[distances.clamp(-self.max_distance, self.max_distance) + self.max_distance]
        context = ContextParallel(self.config)
        of_heads = context.own_heads(self.weight, 1)
        scores = F.embedding(context.own_queries(buckets, 0), of_heads).permute(2, 0, 1)[None].contiguous()
        hidden = None
        if not self.bidirectional and queries > 1:
            hidden = torch.ones_like(buckets, dtype=torch.bool).triu(1 + length - queries)[None, None]
            hidden = context.own_queries(hidden, 2)
        if attention_mask is not None:
            padding = F.pad(attention_mask == 0, (0, len(places) - length))[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        if hidden is not None:
            # Overwritten, not added: a large bias must not make a hidden key visible.
            scores = scores.masked_fill(hidden, MASKED_SCORE)
        return scores[..., :length]
