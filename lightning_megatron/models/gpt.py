"""What does one pipeline stage of a GPT hold? Megatron's GPTModel with our slots in it, and positions that count."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from typing_extensions import override

from lightning_megatron.engine.fillers.norm import Norm
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layer_specs import gpt_block_spec
from lightning_megatron.models.rotary import angles_at, inverse_frequencies
from lightning_megatron.models.transformer_config import EngineSettings, transformer_config
from lightning_megatron.models.vocabulary import silence_padding

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary scalings whose frequencies are others in longer sequences."""


class PositionedGPT(GPTModel):
    """Megatron's GPTModel with what it lacks of a ``ModelConfig``.

    Positions may be left out (0, 1, 2, ...) and count in rotary models too (megatron-core 0.16.1,
    models/gpt/gpt_model.py:_preprocess ignores ``position_ids`` there); rotary frequencies are scaled in every way that
    Hugging Face knows; embeddings may be normalized.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig, **arguments: Any) -> None:
        """Build the chunk.

        Args:
            model: The description.
            config: The engine's, made from it.
            arguments: Of Megatron's GPTModel.
        """
        is_rotary = model.position_embedding_type == "rope"
        is_absolute = model.position_embedding_type == "learned_absolute"
        super().__init__(
            config=config,
            # Megatron knows no ALiBi; it is in the core attention.
            position_embedding_type="learned_absolute" if is_absolute else "rope" if is_rotary else "none",
            **arguments,
        )
        self.description = model
        self.rotary_length: int | None = None
        """Tokens of the longest row, where a call shows only some rows of a batch; None: as the positions say."""
        if self.pre_process:
            self.embedding.embedding_dropout.p = model.embedding_dropout
            if model.embedding_layernorm:
                self.embedding.norm = Norm(config, model.hidden_size, model.layernorm_epsilon)
        if is_rotary:
            # The engine knows only the constants of Llama 3.1; the config may say others.
            self.rotary_pos_emb.inv_freq = self._frequencies().to(self.rotary_pos_emb.inv_freq.device)

    @override
    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        positions = position_ids
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        decoder_input, angles, *others = super()._preprocess(input_ids, positions, *args, **kwargs)
        if self.pre_process and self.description.embedding_layernorm:
            # Under sequence parallelism on this rank's part; the gradients of the norm are summed over TP like others.
            decoder_input = self.embedding.norm(decoder_input).to(decoder_input.dtype)
        if self.position_embedding_type == "rope":
            angles = self._angles(angles, input_ids.shape[1], position_ids)
        return (decoder_input, angles, *others)

    def _angles(self, counted: torch.Tensor, seq_length: int, position_ids: torch.Tensor | None) -> torch.Tensor:
        """How far each pair of a head turns: [s, 1 or b, 1, kv_channels].

        Args:
            counted: The engine's angles for 0, 1, 2, ..., with frequencies that no length changes.
            seq_length: Tokens of a row.
            position_ids: [b, s], or None for 0, 1, 2, ...
        """
        scaling = self.description.rope_scaling
        if scaling is None or scaling.rope_type not in _LENGTH_DEPENDENT:
            return counted if position_ids is None else angles_at(position_ids, self.rotary_pos_emb.inv_freq)
        if position_ids is None:
            position_ids = torch.arange(seq_length, device=counted.device)[None]
            length = seq_length
        elif self.rotary_length is not None:
            length = self.rotary_length
        else:
            # Hugging Face's measure of a sequence's length; it makes the host wait, in these two scalings only.
            length = int(position_ids.max()) + 1
        return angles_at(position_ids, self._frequencies(length).to(counted.device))

    def _frequencies(self, *seq_length: int) -> torch.Tensor:
        model = self.description
        return inverse_frequencies(model.kv_channels, model.rotary_base, model.rope_scaling, *seq_length)


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
        model,
        config,
        transformer_layer_spec=gpt_block_spec(model, config, vp_stage),
        vocab_size=model.padded_vocab_size(parallel.tp),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )
    if chunk.post_process:
        silence_padding(chunk.output_layer, model, parallel.tp)
    chunk.to(settings.device)
    return chunk
