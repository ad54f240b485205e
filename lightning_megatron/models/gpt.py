"""One pipeline chunk of a model: what all have (``Chunk``), and that of a GPT.

GPT, BERT and T5 stand on Megatron-Core's ``LanguageModule``, which ties embeddings over pipeline stages, and its
``TransformerBlock``, not on its whole models: those of megatron-core 0.16.1 have no pipeline (T5), refuse
sequence parallelism in the head (BERT), or ignore positions (GPT), and ``GPTModel`` is deprecated upstream.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lightning_megatron.engine.fillers.context import ContextParallel
from lightning_megatron.engine.fillers.kernels import Norm, soft_capped
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layers import LayerStack, block_spec
from lightning_megatron.models.rotary import angles_at, inverse_frequencies


class Chunk(LanguageModule):
    """What Megatron's schedule, gradient reduction and checkpoints expect of a chunk, whatever its layers are.

    Attributes:
        pre_process: Whether the embedding is here.
        post_process: Whether the output layer (or another head) is here.
        context: Which tokens of a row this rank computes, None at cp=1; a chunk is called with whole rows, and returns
            them.
        share_embeddings_and_output_weights: Whether the output layer is the embedding; on the last of several stages it
            is a copy, whose gradient Megatron's ``finalize_model_grads`` adds to that of the first stage.
    """

    stack_name: ClassVar[str] = "decoder"
    """Of the attribute that holds the layers; the names of weights begin with it."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> None:
        """Create the embedding, if it is here.

        Args:
            model: The description.
            config: The same in the engine's words.
            vp_stage: Which virtual stage; None if there is only one.
        """
        super().__init__(config=config)
        self.description = model
        self.context = ContextParallel(config) if config.context_parallel_size > 1 else None
        self._padded_vocab_size = model.padded_vocab_size(config.tensor_model_parallel_size)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.pre_process: bool = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.post_process: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.has_output_layer = model.has_output_layer
        self.share_embeddings_and_output_weights = self.has_output_layer and model.share_embeddings_and_output_weights
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=self._padded_vocab_size,
                max_sequence_length=model.max_position_embeddings + model.position_offset,
                position_embedding_type="learned_absolute" if model.has_position_table else "none",
                num_tokentypes=model.num_tokentypes,
            )
            self.embedding.embedding_dropout.p = model.embedding_dropout

    def create_layers(self) -> LayerStack:
        """This chunk's share of an even cut of the layers and, on the last stage, the final norm."""
        spec = block_spec(self.description, self.config, self.vp_stage)
        ends = {"pre_process": self.pre_process, "post_process": self.post_process}
        return LayerStack(self.config, spec, vp_stage=self.vp_stage, **ends)

    def create_output_layer(self, *, bias: bool = False) -> None:
        """Create the layer that makes logits, if it is here, and tie it to the embedding if it is that."""
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                self.description.hidden_size,
                self._padded_vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=bias,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def predictions(self, hidden: Tensor, labels: Tensor | None, runtime_gather_output: bool | None = None) -> Tensor:
        """Logits [b, s, v/tp or v], or with ``labels`` [b, s] the loss of each, [b, s] fp32.

        Args:
            hidden: [s or s/tp, b, h]; here and in what follows s is the tokens of this rank of the cp group.
            labels: int64, of the whole rows; None for logits.
            runtime_gather_output: Whether logits are gathered over the tensor-parallel ranks.
        """
        if self.description.logits_multiplier != 1.0:
            hidden = hidden * self.description.logits_multiplier  # h numbers a token, not v
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=tied, runtime_gather_output=runtime_gather_output)
        if self.description.logits_softcap is not None:
            logits = soft_capped(logits, self.description.logits_softcap)
        is_whole = logits.shape[-1] == self._padded_vocab_size
        mask_padded_vocab_(logits, self.description.vocab_size, 0 if is_whole else self.pg_collection.tp.rank())
        if labels is None:
            return self.all_tokens(logits.transpose(0, 1).contiguous())
        return self.all_tokens(self.compute_language_model_loss(self.own_tokens(labels), logits))

    def own_tokens(self, whole: Tensor) -> Tensor:
        """[b, s] -> [b, s/cp]: what is of the tokens that this rank computes."""
        return whole if self.context is None else self.context.own_tokens(whole)

    def all_tokens(self, own: Tensor) -> Tensor:
        """[b, s/cp, ...] -> [b, s, ...]; every rank of the cp group must call."""
        return own if self.context is None else self.context.gather_tokens(own)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take what the stage before sent: [s or s/tp, b, h]; Megatron's schedules call it."""
        stack = getattr(self, self.stack_name)
        stack.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where this rank's weights lie in the whole model, by Megatron's checkpoint names."""
        state: dict[str, Any]
        if self.has_output_layer:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:  # megatron-core 0.16.1, language_module.py: a last stage without an output layer is a KeyError
            state = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


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
            self._depends_on_length = model.rope_scaling is not None and model.rope_scaling.depends_on_length
            self._frequencies: dict[int | None, Tensor] = {None: self._frequencies_at(None)}
            """By the tokens of the longest row; none is ever dropped: a recorded graph reads it where it lies."""
        self.decoder = self.create_layers()
        self.create_output_layer()

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
        positions = self.own_tokens(position_ids + model.position_offset)
        embedded: Tensor = self.embedding(self.own_tokens(input_ids), positions)
        if model.embedding_layernorm:
            # Under sequence parallelism on this rank's part; the gradients of the norm are summed over TP like others.
            embedded = self.embedding.norm(embedded).to(embedded.dtype)
        return embedded if self._multiplier == 1.0 else embedded * self._multiplier

    def _padding(self, attention_mask: Tensor | None) -> Tensor | None:
        """[b, s/cp or s/cp/tp], bool: the tokens of this rank that experts need not share out evenly; None for none."""
        if attention_mask is None or self.description.experts is None or not self.training:
            return None
        padding = self.own_tokens(attention_mask == 0)
        if self.config.sequence_parallel:
            padding = padding.chunk(self.config.tensor_model_parallel_size, dim=1)[self.pg_collection.tp.rank()]
        return padding

    def _angles(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """How far each pair of a head turns: [s/cp, 1 or b, 1, rotary_width], or for two thetas both in turn."""
        longest: int | None = None
        if self._depends_on_length:
            longest = input_ids.shape[1] if position_ids is None else self.rotary_length
            if position_ids is not None and longest is None:
                # Hugging Face's measure of a sequence's length; it makes the host wait, in these two scalings only.
                longest = int(position_ids.max()) + 1
        if longest not in self._frequencies:
            self._frequencies[longest] = self._frequencies_at(longest)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        positions = self.own_tokens(position_ids)
        return angles_at(positions, self._frequencies[longest], interleaved=self.description.rotary_interleaved)

    def _frequencies_at(self, longest: int | None) -> Tensor:
        model = self.description
        # The engine knows only the constants of Llama 3.1; the config may say others.
        frequencies = inverse_frequencies(model.rotary_width, model.rotary_base, model.rope_scaling, longest)
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


def mask_padded_vocab_(logits: Tensor, vocab_size: int, tp_rank: int) -> Tensor:
    """Set the logits of padding rows to -inf in place: they never win and their gradient is exactly 0.

    Only the padded columns are touched, and autograd does not see it: nothing saves the logits, and the gradient of a
    softmax is 0 where the logit is -inf. With much padding a whole shard can be hidden; another rank has the maximum.

    Args:
        logits: [..., v/tp], the shard of rank ``tp_rank``; gathered logits are the shard of rank 0.
        vocab_size: Vocabulary without padding.
        tp_rank: Which shard this is.

    Returns:
        ``logits``.
    """
    width = logits.shape[-1]
    first_padding = max(0, vocab_size - tp_rank * width)
    if first_padding < width:
        logits.detach()[..., first_padding:].fill_(float("-inf"))
    return logits
