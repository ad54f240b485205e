"""One pipeline chunk of a GPT: decoder layers under learned, rotary or ALiBi positions, and the output layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.fillers.norm import Norm
from lightning_megatron.models.chunk import Chunk
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.rotary import angles_at, inverse_frequencies

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary scalings whose frequencies are others in longer sequences."""
_MAX_LENGTHS = 64
"""Of rows, whose angles are kept."""


class GPTChunk(Chunk):
    """A stage of a GPT; weights have the names of Megatron-Core's ``GPTModel``.

    Positions may be left out (0, 1, 2, ...) and count in rotary models too; rotary frequencies are scaled in every way
    that Hugging Face knows; embeddings may be normalized.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> None:
        """Create this rank's layers; arguments are those of ``Chunk``."""
        super().__init__(model, config, vp_stage)
        self.rotary_length: int | None = None
        """Tokens of the longest row, where a call shows only some rows of a batch; None: as the positions say."""
        # Rounded to the weights' dtype, as Gemma was trained.
        self._multiplier: float = torch.tensor(model.embedding_multiplier, dtype=config.params_dtype).item()
        if self.pre_process and model.embedding_layernorm:
            self.embedding.norm = Norm(config, model.hidden_size, model.layernorm_epsilon)
        if model.position_embedding_type == "rope":
            self._rotary_frequencies = self._frequencies()
            self._counted_angles: dict[tuple[int, int], Tensor] = {}
        self.decoder = self.create_block()
        if self.post_process:
            self.output_layer = self.create_output_layer()
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        runtime_gather_output: bool | None = None,
    ) -> Tensor:
        """Run this stage; all tensor- and context-parallel ranks must call.

        Args:
            input_ids: [b, s] int64.
            position_ids: [b, s] int64; None counts 0, 1, 2, ...
            attention_mask: [b, s], the number of the segment that a token belongs to, 0 for padding; None for one.
            labels: [b, s] int64; None for logits.
            runtime_gather_output: Whether logits are gathered over the tensor-parallel ranks.

        Returns:
            Before the last stage hidden states, [s/cp or s/cp/tp, b, h]; there the loss of each label, [b, s] fp32, or
            logits, [b, s, v/tp or v].
        """
        embedded = self._embedded(input_ids, position_ids, attention_mask) if self.pre_process else None
        angles = None
        if self.description.position_embedding_type == "rope":
            angles = self._angles(input_ids, position_ids)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=attention_mask,
            rotary_pos_emb=angles,
            padding_mask=self._padding(attention_mask),
        )
        return self.predictions(hidden, labels, runtime_gather_output) if self.post_process else hidden

    def _embedded(self, input_ids: Tensor, position_ids: Tensor | None, segments: Tensor | None) -> Tensor:
        model = self.description
        if position_ids is None and model.position_offset and segments is not None:
            is_token = (segments != 0).long()
            position_ids = is_token.cumsum(-1) * is_token - 1  # OPT has a row for padding, before that of position 0
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        own = self.context.own_tokens
        embedded: Tensor = self.embedding(own(input_ids), own(position_ids + model.position_offset))
        if model.embedding_layernorm:
            # Under sequence parallelism on this rank's part; the gradients of the norm are summed over TP like others.
            embedded = self.embedding.norm(embedded).to(embedded.dtype)
        return embedded if self._multiplier == 1.0 else embedded * self._multiplier

    def _padding(self, attention_mask: Tensor | None) -> Tensor | None:
        """[b, s/cp or s/cp/tp], bool: the tokens of this rank that experts need not share out evenly; None for none."""
        if attention_mask is None or self.description.experts is None or not self.training:
            return None
        padding = self.context.own_tokens(attention_mask == 0)
        if self.config.sequence_parallel:
            padding = padding.chunk(self.config.tensor_model_parallel_size, dim=1)[self.pg_collection.tp.rank()]
        return padding

    def _angles(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """How far each pair of a head turns: [s/cp, 1 or b, 1, rotary_width], or for two thetas both in turn."""
        scaling, length = self.description.rope_scaling, input_ids.shape[1]
        depends_on_length = scaling is not None and scaling.rope_type in _LENGTH_DEPENDENT
        if position_ids is None:
            kind = (length, self.context.size)  # whole rows while text is generated
            if (known := self._counted_angles.get(kind)) is not None:
                return known
            frequencies = self._frequencies(length) if depends_on_length else self._rotary_frequencies
            angles = self._angles_at(torch.arange(length, device=input_ids.device)[None], frequencies)
            if (
                len(self._counted_angles) < _MAX_LENGTHS
            ):  # none is ever dropped: a recorded graph reads it where it lies
                self._counted_angles[kind] = angles
            return angles
        if not depends_on_length:
            return self._angles_at(position_ids, self._rotary_frequencies)
        # Hugging Face's measure of a sequence's length; it makes the host wait, in these two scalings only.
        length = int(position_ids.max()) + 1 if self.rotary_length is None else self.rotary_length
        return self._angles_at(position_ids, self._frequencies(length))

    def _angles_at(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        own = self.context.own_tokens(positions)
        return angles_at(own, frequencies, interleaved=self.description.rotary_interleaved)

    def _frequencies(self, *seq_length: int) -> Tensor:
        model = self.description
        # The engine knows only the constants of Llama 3.1; the config may say others.
        frequencies = inverse_frequencies(model.rotary_width, model.rotary_base, model.rope_scaling, *seq_length)
        if model.rotary_base_of_windows is not None:
            of_windows = inverse_frequencies(model.rotary_width, model.rotary_base_of_windows, None)
            frequencies = torch.stack((frequencies, of_windows))
        return frequencies.to(torch.cuda.current_device())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As ``Chunk``'s, without the output layer's (empty) extra state, which Megatron's GPTs do not have either."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        return state
