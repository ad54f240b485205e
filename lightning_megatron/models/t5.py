"""What does one pipeline chunk of a T5 hold? Parts of one joint stack: the encoder's layers, then the decoder's.

Between chunks travels one tensor, the encoder's hidden states followed by the decoder's along the sequence, so that
Megatron-Core's schedules run unchanged with a sequence of s_enc + s_dec; what a chunk does not work on passes through.
megatron-core 0.16.1 has no pipeline for its own T5 (pretrain_t5.py refuses it).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from torch import Tensor

from lightning_megatron.engine.wrap import Replicated, mark_replica
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE, Share, shares, t5_layout
from lightning_megatron.models.t5_stack import T5Stack
from lightning_megatron.models.transformer_config import EngineSettings, transformer_config
from lightning_megatron.models.vocabulary import silence_padding


def build_t5(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """This rank's model chunks (one per virtual stage), on ``settings.device``, weights not yet filled.

    ``transformer_config_overrides={"pipeline_model_parallel_layout": [2, 5]}`` says by hand how many layers of the
    joint stack each chunk holds; without it they are balanced by cost. Every rank must call, after the process groups
    exist.

    Raises:
        ConfigError: If the model cannot be split as ``settings.parallel`` says, or core attention should be recomputed.
    """
    if settings.recompute.granularity == "selective":
        raise ConfigError(
            "recompute='selective' cannot train T5's attention bias: the engine would walk through its graph once per "
            "layer (and the attention in use keeps no scores that recomputing could save); use recompute='full' or None"
        )
    overrides = dict(settings.overrides)
    layout = t5_layout(model, settings.parallel, overrides.pop(OVERRIDE, None))
    config = transformer_config(model, replace(settings, overrides=overrides))
    if config.distribute_saved_activations:
        raise ConfigError(
            "transformer_config_overrides: distribute_saved_activations=True cannot be used with T5, whose encoder and "
            "decoder states arrive as views of one tensor; leave it out"
        )
    stages: list[int | None] = list(range(settings.parallel.vpp)) if settings.parallel.vpp else [None]
    held = shares(model.num_layers, layout)
    return torch.nn.ModuleList([T5Chunk(model, config, held, stage).to(settings.device) for stage in stages])


class T5Chunk(LanguageModule):
    """One chunk; ``encoder`` and ``decoder`` hold what this chunk has of either, perhaps nothing."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, held: list[Share], vp_stage: int | None) -> None:
        """Create this rank's layers.

        Args:
            model: The description.
            config: The same in the engine's words.
            held: What each chunk of the pipeline holds.
            vp_stage: Which virtual stage; None if there is only one.
        """
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        share = held[(vp_stage or 0) * self.pp_group.size() + self.pp_group.rank()]
        self.pre_process, self.post_process = share.is_first, share.is_last
        self.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
        self._output_scale = model.hidden_size**-0.5 if model.scale_decoder_outputs else None
        self._input_tensor: Tensor | None = None
        heads = model.num_attention_heads // config.tensor_model_parallel_size
        self._table_shape = (model.relative_attention_num_buckets, heads)
        if self.pre_process:
            self.embedding = _embedding(model, config)
        self.encoder = T5Stack(model, config, share.encoder, is_decoder=False, has_final_norm=share.ends_encoder)
        self.decoder = T5Stack(model, config, share.decoder, is_decoder=True, has_final_norm=share.is_last)
        if len(held) > 1:
            for stack in (self.encoder, self.decoder):
                if stack.relative_bias is not None:
                    mark_replica(stack.relative_bias.weight, is_owner=0 in stack.numbers)
        if self.post_process:
            self.output_layer = _output_layer(model, config, is_tied_here=self.pre_process)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def replicated(self) -> list[Replicated]:
        """The tables of relative positions, which every chunk with layers of their stack has."""
        tables = []
        for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            weight = None if stack.relative_bias is None else stack.relative_bias.weight
            tables.append(Replicated(name=name, shape=self._table_shape, parameter=weight))
        return tables

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Take what the chunk before sent: [(s_enc + s_dec) or its tp-th, b, h]."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        encoder_ids: Tensor,
        decoder_ids: Tensor,
        encoder_mask: Tensor | None = None,
        decoder_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        runtime_gather_output: bool = False,
    ) -> Tensor:
        """Run this chunk; all tensor-parallel ranks must call, and every chunk needs the same arguments.

        Args:
            encoder_ids: [b, s_enc] int64; s_enc is 0 once the decoder's layers have cached what they see
                of the encoder.
            decoder_ids: [b, s_dec] int64.
            encoder_mask: [b, s_enc], 0 where a token is padding; None if none is.
            decoder_mask: [b, s_dec], the same for the decoder, which sees only backwards besides.
            labels: [b, s_dec] int64; None for logits.
            runtime_gather_output: Whether logits are gathered over the tensor-parallel ranks.

        Returns:
            Before the last chunk encoder's and decoder's states, [s_enc + s_dec or its tp-th, b, h]; there the loss of
            each label, [b, s_dec] fp32, or logits, [b, s_dec, v/tp or v].
        """
        encoder, decoder = self._inputs(encoder_ids, decoder_ids)
        # Recomputation by ``block`` counts the layers of a chunk, of whichever stack.
        budget = self.config.recompute_num_layers or 0
        if encoder.shape[0] > 0:
            encoder = self.encoder(encoder, encoder_mask, num_recomputed=budget)
        budget -= len(self.encoder.layers)
        decoder = self.decoder(decoder, decoder_mask, encoder, encoder_mask, num_recomputed=budget)
        if not self.post_process:
            # A tensor of its own, no view: the schedule frees its storage once it is sent.
            return torch.cat([encoder, decoder])
        if self._output_scale is not None:
            decoder = decoder * self._output_scale
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(decoder, weight=tied, runtime_gather_output=runtime_gather_output)
        if labels is None:
            logits_of_rows: Tensor = logits.transpose(0, 1).contiguous()
            return logits_of_rows
        losses: Tensor = self.compute_language_model_loss(labels, logits)
        return losses

    def _inputs(self, encoder_ids: Tensor, decoder_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.pre_process:
            # Two look-ups: under sequence parallelism each part is scattered on its own.
            encoder = self.embedding(encoder_ids, None) if encoder_ids.shape[1] > 0 else None
            decoder = self.embedding(decoder_ids, None)
            return decoder[:0] if encoder is None else encoder, decoder
        assert self._input_tensor is not None, "the schedule sets the input of every chunk but the first"
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        lengths = [ids.shape[1] // shards for ids in (encoder_ids, decoder_ids)]
        encoder, decoder = self._input_tensor.split(lengths)
        return encoder, decoder


def _embedding(model: ModelConfig, config: TransformerConfig) -> LanguageModelEmbedding:
    embedding = LanguageModelEmbedding(
        config=config,
        vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=0,
        position_embedding_type="none",
    )
    embedding.embedding_dropout.p = model.embedding_dropout
    return embedding


def _output_layer(model: ModelConfig, config: TransformerConfig, *, is_tied_here: bool) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(
        model.hidden_size,
        model.padded_vocab_size(config.tensor_model_parallel_size),
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=is_tied_here and model.share_embeddings_and_output_weights,
    )
    silence_padding(layer, model, config.tensor_model_parallel_size)
    return layer
