"""Model chunks: ``Chunk``, the base class of all architectures, and ``GPTChunk``.

GPT, BERT and T5 are built on Megatron-Core's ``LanguageModule``, which ties embeddings over pipeline stages, and its
``TransformerBlock``, not on its complete models: those of megatron-core 0.16.1 have no pipeline parallelism (T5),
refuse sequence parallelism in the head (BERT), or ignore positions (GPT), and ``GPTModel`` is deprecated upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lightning_megatron.engine.ops.context import ContextParallel
from lightning_megatron.engine.ops.norms import Norm
from lightning_megatron.engine.ops.soft_cap import soft_capped
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.heads import Classifier, mark_last_tokens, pool_marked_tokens
from lightning_megatron.models.layers import LayerStack, block_spec
from lightning_megatron.models.rotary import inverse_frequencies, query_scales, rotary_angles

LossOfLogits: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Losses of tokens, [b, s/cp, ...] fp32, from logits [s/cp, b, v/tp] and labels [b, s/cp]; collective over tp."""


class Chunk(LanguageModule):
    """Base class of a model chunk: the interface that Megatron's schedule, gradient reduction and checkpoints expect.

    Attributes:
        pre_process: Whether this chunk has the embedding.
        post_process: Whether this chunk has the output layer (or another head).
        context: Splits rows over the cp group; None at cp=1. Inputs and outputs of a chunk are full rows.
        share_embeddings_and_output_weights: Whether embedding and output layer are tied; the last of several stages has
            a copy of the embedding, and Megatron's ``finalize_model_grads`` sums the gradients of both.
    """

    stack_name: ClassVar[str] = "decoder"
    """Name of the attribute with the layers, and prefix of their weights' names."""

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        vp_stage: int | None,
    ) -> None:
        """Create the embedding, if this chunk has it.

        Args:
            model: The model's config.
            config: Megatron's config of it.
            vp_stage: Virtual pipeline stage; None without virtual stages.
        """
        super().__init__(config=config)
        self.description = model
        self.context: ContextParallel | None = None
        if config.context_parallel_size > 1:
            self.context = ContextParallel(config)
        self._padded_vocab_size = model.padded_vocab_size(config.tensor_model_parallel_size)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.pre_process: bool = parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        )
        self.post_process: bool = parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        )
        self.has_output_layer = model.has_output_layer
        self.share_embeddings_and_output_weights = (
            self.has_output_layer and model.share_embeddings_and_output_weights
        )
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
        """Create this chunk's layers and, on the last stage, the final norm."""
        spec = block_spec(self.description, self.config, self.vp_stage)
        ends = {"pre_process": self.pre_process, "post_process": self.post_process}
        return LayerStack(self.config, spec, vp_stage=self.vp_stage, **ends)

    def create_output_layer(self, *, bias: bool = False) -> None:
        """Create the output layer, if this chunk has it, and set up tied embeddings."""
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                self.description.hidden_size,
                self._padded_vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=bias,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process
                and self.share_embeddings_and_output_weights,
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def predictions(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        runtime_gather_output: bool | None = None,
        loss_of_logits: LossOfLogits | None = None,
    ) -> Tensor:
        """Compute logits [b, s, v/tp or v], or with ``labels`` [b, s] per-token losses, [b, s] fp32.

        Args:
            hidden: [s/cp or s/cp/tp, b, h].
            labels: int64; None for logits.
            runtime_gather_output: Whether to all-gather logits over the tp group.
            loss_of_logits: Computes the losses of labels; None for cross-entropy.
        """
        logits = self.vocab_logits(hidden, runtime_gather_output)
        if labels is None:
            return self.gather_tokens(logits.transpose(0, 1).contiguous())
        own_labels = self.own_tokens(labels)
        if loss_of_logits is not None:
            return self.gather_tokens(loss_of_logits(logits, own_labels))
        losses = self.compute_language_model_loss(own_labels, logits)
        return self.gather_tokens(losses)

    def vocab_logits(self, hidden: Tensor, runtime_gather_output: bool | None = None) -> Tensor:
        """Compute this rank's logits, [s/cp, b, v/tp or v]; vocabulary padding is -inf.

        Args:
            hidden: [s/cp or s/cp/tp, b, h].
            runtime_gather_output: Whether to all-gather logits over the tp group.
        """
        if self.description.logits_multiplier != 1.0:
            # On h values per token instead of v.
            hidden = hidden * self.description.logits_multiplier
        tied = None
        if self.share_embeddings_and_output_weights:
            tied = self.shared_embedding_or_output_weight()
        logits, _ = self.output_layer(
            hidden,
            weight=tied,
            runtime_gather_output=runtime_gather_output,
        )
        if self.description.logits_softcap is not None:
            logits = soft_capped(logits, self.description.logits_softcap)
        is_gathered = logits.shape[-1] == self._padded_vocab_size
        rank = 0 if is_gathered else self.pg_collection.tp.rank()
        return mask_padded_vocab_(logits, self.description.vocab_size, rank)

    def classify_tokens(self, hidden: Tensor) -> Tensor:
        """Compute logits of each token's labels with ``token_head``, [b, s, num_labels].

        Args:
            hidden: [s/cp or s/cp/tp, b, h].
        """
        logits: Tensor = self.token_head(hidden)
        return self.gather_tokens(logits.transpose(0, 1).contiguous())

    def own_tokens(self, rows: Tensor) -> Tensor:
        """Return this rank's context-parallel shard: [b, s] -> [b, s/cp]."""
        if self.context is None:
            return rows
        return self.context.own_tokens(rows)

    def gather_tokens(self, shard: Tensor) -> Tensor:
        """All-gather context-parallel shards: [b, s/cp, ...] -> [b, s, ...]. Collective over the cp group."""
        if self.context is None:
            return shard
        return self.context.gather_tokens(shard)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Set the previous stage's output, [s/cp or s/cp/tp, b, h]; called by Megatron's schedules."""
        if isinstance(input_tensor, list):
            input_tensor = input_tensor[0]
        stack = getattr(self, self.stack_name)
        stack.set_input_tensor(input_tensor)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state dict, by Megatron's checkpoint names."""
        state: dict[str, Any]
        if self.has_output_layer:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:  # megatron-core 0.16.1, language_module.py raises a KeyError on a last stage without an output layer
            state = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


class GPTChunk(Chunk):
    """Model chunk of a GPT; weights have the names of Megatron-Core's ``GPTModel``.

    Unlike ``GPTModel``: positions are optional (default 0, 1, 2, ...) and respected by rotary models; all of Hugging
    Face's rotary scalings are supported; embeddings may be normalized.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        vp_stage: int | None,
    ) -> None:
        """Create this rank's layers; arguments as for ``Chunk``."""
        super().__init__(model, config, vp_stage)
        # Rounded to the weights' dtype, as in Gemma's training.
        self._multiplier: float = torch.tensor(
            model.embedding_multiplier, dtype=config.params_dtype
        ).item()
        if self.pre_process and model.embedding_layernorm:
            self.embedding.norm = Norm(config, model.hidden_size, model.layernorm_epsilon)
        if model.position_embedding_type == "rope":
            self._depends_on_length = (
                model.rope_scaling is not None and model.rope_scaling.depends_on_length
            )
            self._frequencies: dict[int | None, Tensor] = {None: self._frequencies_at(None)}
            """By length of the longest row. Entries are never dropped: captured CUDA graphs read their memory."""
        self.decoder = self.create_layers()
        if model.has_output_layer:
            self.create_output_layer()
        elif self.post_process and model.task == "sequence_classification":
            self.classification_head = Classifier(model, config)
        elif self.post_process:
            self.token_head = Classifier(model, config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        runtime_gather_output: bool | None = None,
        longest: int | None = None,
        loss_of_logits: LossOfLogits | None = None,
    ) -> Tensor:
        """Run this chunk. Collective over the tp and cp groups.

        Args:
            input_ids: [b, s] int64.
            position_ids: [b, s] int64; None for 0, 1, 2, ...
            attention_mask: [b, s], segment number of each token, 0 for padding; None for a single segment.
            labels: [b, s] int64; None for logits.
            runtime_gather_output: Whether to all-gather logits over the tp group.
            longest: Length of the longest row, for calls with only some rows of a batch; None: take it from the
                positions.
            loss_of_logits: Computes the losses of labels, [b, s, ...]; None for cross-entropy.

        Returns:
            On the last chunk, by task: ``causal_lm`` per-token losses, [b, s] fp32, or logits, [b, s, v/tp or v];
            ``sequence_classification`` logits [b, num_labels] of each row's last token that is not padding;
            ``token_classification`` logits [b, s, num_labels]. Before it hidden states, [s/cp or s/cp/tp, b, h].
        """
        hidden = self.hidden_states(input_ids, position_ids, attention_mask, longest)
        if not self.post_process:
            return hidden
        if self.description.task == "sequence_classification":
            return self._classify_sequences(hidden, mark_last_tokens(input_ids, attention_mask))
        if self.description.task == "token_classification":
            return self.classify_tokens(hidden)
        return self.predictions(hidden, labels, runtime_gather_output, loss_of_logits)

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:
        """Hidden states behind this chunk's layers, and the final norm of the last one: [s/cp or s/cp/tp, b, h].

        Arguments are those of ``forward``. Collective over the tp and cp groups.
        """
        embedded = None
        if self.pre_process:
            embedded = self._embed(input_ids, position_ids, attention_mask)
        angles = None
        if self.description.position_embedding_type == "rope":
            angles = self._angles(input_ids, position_ids, longest)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=attention_mask,
            rotary_pos_emb=angles,
            padding_mask=self._padding_mask(attention_mask),
        )
        return hidden

    def _classify_sequences(self, hidden: Tensor, is_last: Tensor) -> Tensor:
        """Logits of each row's labels, [b, num_labels], from the hidden state of its marked token.

        The token is on one rank of the cp group, and with sequence parallelism on one of the tp group.

        Args:
            hidden: [s/cp or s/cp/tp, b, h].
            is_last: [b, s], bool: one marked token a row.
        """
        is_own = self.own_tokens(is_last)
        pooled = pool_marked_tokens(hidden, self._sequence_shard(is_own))
        if self.config.sequence_parallel:
            # All ranks compute the same with it: the token's rank alone gets its gradient, without a sum.
            pooled = reduce_from_tensor_model_parallel_region(pooled, group=self.pg_collection.tp)
        logits: Tensor = self.classification_head(pooled)
        if self.context is None:
            return logits
        # Gradients of the head's weights are summed over cp, so each row's come from one rank.
        return self.context.sum_parts(logits.masked_fill(~is_own.any(dim=-1, keepdim=True), 0.0))

    def _embed(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        segments: Tensor | None,
    ) -> Tensor:
        model = self.description
        if position_ids is None and model.position_offset and segments is not None:
            is_token = (segments != 0).long()
            # Padding: -1, whose row precedes position 0's in OPT.
            position_ids = is_token.cumsum(-1) * is_token - 1
        if position_ids is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = positions.expand_as(input_ids)
        positions = self.own_tokens(position_ids + model.position_offset)
        embedded: Tensor = self.embedding(self.own_tokens(input_ids), positions)
        if model.embedding_layernorm:
            # Sequence parallelism: on this rank's shard; gradients are summed over TP, as for all norms.
            embedded = self.embedding.norm(embedded).to(embedded.dtype)
        if self._multiplier != 1.0:
            embedded = embedded * self._multiplier
        return embedded

    def _padding_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """[b, s/cp or s/cp/tp], bool: this rank's padding, which load balancing of experts ignores; None for none."""
        if attention_mask is None or self.description.experts is None or not self.training:
            return None
        return self._sequence_shard(self.own_tokens(attention_mask == 0))

    def _sequence_shard(self, rows: Tensor) -> Tensor:
        """Return the tokens whose hidden states this tp rank has: [b, s/cp] -> [b, s/cp or s/cp/tp]."""
        if not self.config.sequence_parallel:
            return rows
        shards = rows.chunk(self.config.tensor_model_parallel_size, dim=1)
        own: Tensor = shards[self.pg_collection.tp.rank()]
        return own

    def _angles(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        longest: int | None,
    ) -> Tensor:
        """Rotary angles, [s/cp, 1 or b, 1, rotary_width], or twice the width for two thetas.

        The multipliers of queries, if positions have any, are one more column.
        """
        length: int | None = None
        if self._depends_on_length:
            length = longest
            if position_ids is None:
                length = input_ids.shape[1]
            elif longest is None:
                # Sequence length as in Hugging Face; synchronizes host and device, only for these scalings.
                length = int(position_ids.max()) + 1
        if length not in self._frequencies:
            self._frequencies[length] = self._frequencies_at(length)
        if position_ids is None:
            position_ids = torch.arange(
                input_ids.shape[1],
                device=input_ids.device,
            )[None]
        positions = self.own_tokens(position_ids)
        angles = rotary_angles(
            positions,
            self._frequencies[length],
            interleaved=self.description.rotary_interleaved,
        )
        model = self.description
        if not model.query_scaling_beta:
            return angles
        scales = query_scales(positions, model.query_scaling_beta, model.query_scaling_length)
        return torch.cat((angles, scales.expand(*angles.shape[:3], 1)), dim=-1)

    def _frequencies_at(self, length: int | None) -> Tensor:
        model = self.description
        # Megatron-Core supports only the constants of Llama 3.1.
        frequencies = inverse_frequencies(
            model.rotary_width,
            model.rotary_base,
            model.rope_scaling,
            length,
        )
        if model.rotary_base_of_windows is not None:
            window_frequencies = inverse_frequencies(
                model.rotary_width, model.rotary_base_of_windows, None
            )
            frequencies = torch.stack((frequencies, window_frequencies))
        return frequencies.to(torch.cuda.current_device())

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return ``Chunk``'s state dict without the output layer's (empty) extra state, as Megatron's ``GPTModel``."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        return state


def mask_padded_vocab_(logits: Tensor, vocab_size: int, tp_rank: int) -> Tensor:
    """Set logits of vocabulary padding to -inf in place, so that their probabilities and gradients are exactly 0.

    Only the padded columns are written, and autograd does not record it: no operation saves the logits, and the
    gradient of a softmax is 0 where the logit is -inf. An entire shard may be padding; the maximum is on another rank.

    Args:
        logits: [..., v/tp], the shard of rank ``tp_rank``; for gathered logits [..., v], ``tp_rank`` is 0.
        vocab_size: Vocabulary size without padding.
        tp_rank: Rank in the tp group.

    Returns:
        ``logits``.
    """
    width = logits.shape[-1]
    first_padding = max(0, vocab_size - tp_rank * width)
    if first_padding < width:
        logits.detach()[..., first_padding:].fill_(float("-inf"))
    return logits
