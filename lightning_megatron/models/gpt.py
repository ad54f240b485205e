"""What does one pipeline stage of a GPT hold? Megatron's GPTModel with our slots in it, and positions that count."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from typing_extensions import override

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layer_specs import gpt_block_spec
from lightning_megatron.models.rotary import angles_at, inverse_frequencies
from lightning_megatron.models.transformer_config import EngineSettings, transformer_config
from lightning_megatron.models.vocabulary import silence_padding


class PositionedGPT(GPTModel):
    """Megatron's GPTModel, for which positions may be left out (0, 1, 2, ...) and count in rotary models too.

    megatron-core 0.16.1, models/gpt/gpt_model.py:_preprocess ignores ``position_ids`` for rotary embeddings.
    """

    @override
    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        positions = position_ids
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        prepared: tuple[Any, ...] = super()._preprocess(input_ids, positions, *args, **kwargs)
        if position_ids is None or self.position_embedding_type != "rope":
            return prepared
        decoder_input, _, *others = prepared
        return (decoder_input, angles_at(position_ids, self.rotary_pos_emb.inv_freq), *others)


def build_gpt(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """This rank's model chunks (one per virtual stage), on ``settings.device``, weights not yet filled.

    Every rank must call, after the process groups exist.

    Raises:
        ConfigError: If the model cannot be split as ``settings.parallel`` says.
    """
    config = transformer_config(model, settings)
    stages: list[int | None] = list(range(settings.parallel.vpp)) if settings.parallel.vpp else [None]
    return torch.nn.ModuleList([_chunk(model, config, settings, vp_stage) for vp_stage in stages])


def _chunk(
    model: ModelConfig, config: TransformerConfig, settings: EngineSettings, vp_stage: int | None
) -> PositionedGPT:
    parallel = settings.parallel
    chunk = PositionedGPT(
        config=config,
        transformer_layer_spec=gpt_block_spec(config, vp_stage),
        vocab_size=model.padded_vocab_size(parallel.tp),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )
    if chunk.pre_process:
        chunk.embedding.embedding_dropout.p = model.embedding_dropout
    if chunk.post_process:
        silence_padding(chunk.output_layer, model, parallel.tp)
    if model.position_embedding_type == "rope":
        # The engine knows only the constants of Llama 3.1; the config may say others.
        frequencies = inverse_frequencies(model.kv_channels, model.rotary_base, model.rope_scaling)
        chunk.rotary_pos_emb.inv_freq = frequencies.to(settings.device)
    chunk.to(settings.device)
    return chunk
