"""Model chunk of BERT: embeddings with token types, pre-norm encoder layers, and a task head.

Only parts of Megatron-Core's ``BertModel`` are used (megatron-core 0.16.1, models/bert/bert_model.py): it looks up the
first pipeline stage without the virtual stage, gathers the full sequence for one token, has a norm in its head that
refuses sequence parallelism, and supports only the pretraining head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.norms import Norm
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import Chunk
from lightning_megatron.models.heads import Classifier, gather_sequence, replicated_linear
from lightning_megatron.models.transformer_config import ACTIVATIONS


class BertChunk(Chunk):
    """Model chunk of a BERT for ``model.task``; weights have Megatron-Core's names, where they exist there."""

    stack_name = "encoder"

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        vp_stage: int | None,
    ) -> None:
        """Create this rank's layers; arguments as for ``Chunk``."""
        super().__init__(model, config, vp_stage)
        if self.pre_process and model.pad_token_id >= 0:
            self.embedding.word_embeddings.register_forward_hook(
                _padding_idx_hook(model.pad_token_id)
            )
        self.encoder = self.create_layers()
        if self.post_process:
            self._create_head(model)
        if model.has_output_layer:
            self.create_output_layer(bias=True)

    def _create_head(self, model: ModelConfig) -> None:
        config = self.config
        if model.has_pooler:
            self.pooler = Pooler(model, config)
        if model.task == "pretraining":
            self.binary_head = torch.nn.Linear(
                model.hidden_size,
                2,
                dtype=config.params_dtype,
            )
        if model.task == "sequence_classification":
            self.classification_head = Classifier(model, config)
        if model.task in ("token_classification", "question_answering"):
            self.token_head = Classifier(model, config)
        if model.has_output_layer:
            self.lm_head = MaskedLMHead(model, config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Run this chunk. Collective over the tp and cp groups.

        Args:
            input_ids: [b, s] int64.
            position_ids: [b, s] int64; None for 0, 1, 2, ...
            attention_mask: [b, s] int64, segment number of each token, 0 for padding; or [b, 1, 1 or s, s] bool, True
                where a query (third axis) must not attend to a key (fourth axis).
            tokentype_ids: [b, s] int64; None for 0 everywhere.
            labels: [b, s] int64, for masked language modeling: return per-token losses instead of logits.

        Returns:
            Before the last chunk hidden states [s/cp or s/cp/tp, b, h]. On the last, by task: ``pretraining`` and
            ``masked_lm`` a pair of per-token losses [b, s] fp32 (or logits [b, s, v/tp]) and logits of the sentence
            order [b, 2] (None for ``masked_lm``); ``sequence_classification`` logits [b, num_labels]; other tasks
            logits [b, s, num_labels].
        """
        embedded = None
        if self.pre_process:
            if position_ids is None:
                positions = torch.arange(input_ids.shape[1], device=input_ids.device)
                position_ids = positions.expand_as(input_ids)
            if tokentype_ids is None and self.embedding.num_tokentypes > 0:
                tokentype_ids = torch.zeros_like(input_ids)
            if tokentype_ids is not None:
                tokentype_ids = self.own_tokens(tokentype_ids)
            embedded = self.embedding(
                self.own_tokens(input_ids),
                self.own_tokens(position_ids),
                tokentype_ids,
            )
        hidden = self.encoder(hidden_states=embedded, attention_mask=attention_mask)
        if not self.post_process:
            return hidden
        return self._head(hidden, labels)

    def _head(self, hidden: Tensor, labels: Tensor | None) -> Any:
        task = self.description.task
        if task == "sequence_classification":
            return self._broadcast_first_token(self.classification_head(self.pooler(hidden)))
        if task in ("token_classification", "question_answering"):
            return self.classify_tokens(hidden)
        order = None
        if task == "pretraining":
            order = self._broadcast_first_token(self.binary_head(self.pooler(hidden)))
        return self.predictions(self.lm_head(hidden), labels), order

    def _broadcast_first_token(self, output: Tensor) -> Tensor:
        """Return on every rank of the cp group the output [b, n] of the rank that has the first token of the rows."""
        if self.context is None:
            return output
        return self.context.broadcast_first_token(output)


def _padding_idx_hook(token: int) -> Any:
    """Create a forward hook that zeroes the gradient of a token's look-ups, as ``nn.Embedding(padding_idx)`` does.

    Its row of a tied output layer still gets a gradient, as in Hugging Face.
    """

    def hook(
        module: torch.nn.Module,
        args: tuple[Any, ...],
        output: Tensor,
    ) -> None:
        if output.requires_grad:
            is_padding = (args[0] == token)[..., None]
            output.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))

    return hook


# ---- heads -----------------------------------------------------------------------------------------------------------


class MaskedLMHead(torch.nn.Module):
    """Transform of a masked language model between last layer and output layer: linear, activation, norm."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create uninitialized weights."""
        super().__init__()
        self.dense = replicated_linear(
            model.hidden_size, model.hidden_size, config, on_sequence_shard=True
        )
        self.layer_norm = Norm(config, model.hidden_size, model.layernorm_epsilon)
        self.activation = ACTIVATIONS[model.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        normed: Tensor = self.layer_norm(self.activation(self.dense(hidden)))
        return normed


class Pooler(torch.nn.Module):
    """Pooled representation of each row: linear and tanh on its first token."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create uninitialized weights."""
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.dense = replicated_linear(
            model.hidden_size, model.hidden_size, config, on_sequence_shard=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [b, h], the same on every rank of the tp group. Collective over it."""
        first = hidden[:1]
        if self.sequence_parallel:
            # Gathers only the first token of each shard; that of rank 0 is the first of the sequence.
            first = gather_sequence(first.contiguous())
        return torch.tanh(self.dense(first[0]))
