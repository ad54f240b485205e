"""One pipeline chunk of a BERT: embeddings with token types, pre-norm encoder layers, and the head of a task.

Megatron-Core's own ``BertModel`` (megatron-core 0.16.1, models/bert/bert_model.py) asks for the first stage without its
virtual stage, gathers the whole sequence for one token, normalizes its head with a norm that refuses sequence
parallelism, and knows no head but that of pretraining; so only its parts are used.

With sequence parallelism a rank has a part of the sequence. A head that reads every token works on that part, so that
the gradients of its weights are sums over the ranks (``sequence_parallel``); a head that reads the first token reads it
on all ranks alike.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lightning_megatron.engine.fillers.kernels import Norm
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import Chunk
from lightning_megatron.models.transformer_config import ACTIVATIONS


class BertChunk(Chunk):
    """A stage of a BERT for ``model.task``; weights have Megatron-Core's names where it has any."""

    stack_name = "encoder"

    def __init__(self, model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> None:
        """Create this rank's layers; arguments are those of ``Chunk``."""
        super().__init__(model, config, vp_stage)
        if self.pre_process and model.pad_token_id >= 0:
            self.embedding.word_embeddings.register_forward_hook(_freeze_lookups_of(model.pad_token_id))
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
            self.binary_head = torch.nn.Linear(model.hidden_size, 2, dtype=config.params_dtype)
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
        """Run this stage; all tensor- and context-parallel ranks must call.

        Args:
            input_ids: [b, s] int64.
            position_ids: [b, s] int64; None counts 0, 1, 2, ...
            attention_mask: [b, s] int64, the number of the segment that a token belongs to, 0 for padding; or
                [b, 1, 1 or s, s] bool, True where a token (third axis) must not see another (fourth axis).
            tokentype_ids: [b, s] int64; None for 0 everywhere.
            labels: [b, s] int64, for models that predict tokens: the loss of each is returned instead of logits.

        Returns:
            Hidden states [s/cp or s/cp/tp, b, h] before the last stage. There, by task: ``pretraining`` and
            ``masked_lm`` the pair of each token's loss [b, s] fp32 (or logits [b, s, v/tp]) and the logits of the
            sentence order [b, 2] (None for ``masked_lm``); ``sequence_classification`` logits [b, num_labels]; the
            others logits [b, s, num_labels].
        """
        embedded = None
        if self.pre_process:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            if tokentype_ids is None and self.embedding.num_tokentypes > 0:
                tokentype_ids = torch.zeros_like(input_ids)
            inputs = (input_ids, position_ids, tokentype_ids)
            embedded = self.embedding(*(None if x is None else self.own_tokens(x) for x in inputs))
        hidden = self.encoder(hidden_states=embedded, attention_mask=attention_mask)
        return self._head(hidden, labels) if self.post_process else hidden

    def _head(self, hidden: Tensor, labels: Tensor | None) -> Any:
        task = self.description.task
        if task == "sequence_classification":
            return self._of_first_token(self.classification_head(self.pooler(hidden)))
        if task in ("token_classification", "question_answering"):
            return self.all_tokens(self.token_head(hidden).transpose(0, 1).contiguous())
        order = self._of_first_token(self.binary_head(self.pooler(hidden))) if task == "pretraining" else None
        return self.predictions(self.lm_head(hidden), labels), order

    def _of_first_token(self, found: Tensor) -> Tensor:
        """[b, n], which a rank of the cp group has computed from its first token: that from the row's, on all."""
        return found if self.context is None else self.context.broadcast_first_token(found)


def _freeze_lookups_of(token: int) -> Any:
    """A hook that keeps a token's embedding from learning where it is looked up, as ``nn.Embedding(padding_idx)`` does.

    A tied output layer still moves it, as it does in Hugging Face.
    """

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            frozen = (args[0] == token)[..., None]
            output.register_hook(lambda gradient: gradient.masked_fill(frozen, 0.0))

    return hook


# ---- heads -----------------------------------------------------------------------------------------------------------


def _whole_sequence(part: Tensor) -> Tensor:
    """[s/tp, ...] of every tensor-parallel rank -> [s, ...]; every rank of the tp group must call.

    All ranks compute the same with it, so the gradient of a rank's part is in each of them: it is taken, not summed.
    """
    whole: Tensor = gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=False)
    return whole


def _linear(rows: int, columns: int, config: TransformerConfig, *, sees_part_of_sequence: bool) -> torch.nn.Linear:
    linear = torch.nn.Linear(rows, columns, dtype=config.params_dtype)
    for parameter in linear.parameters():
        # distributed/finalize_model_grads.py sums these gradients over TP: each rank saw a part of the sequence.
        parameter.sequence_parallel = config.sequence_parallel and sees_part_of_sequence  # type: ignore[attr-defined]
    return linear


class MaskedLMHead(torch.nn.Module):
    """What comes between the last layer and the logits of a masked language model: dense, activation, norm."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create the weights, not yet filled."""
        super().__init__()
        self.dense = _linear(model.hidden_size, model.hidden_size, config, sees_part_of_sequence=True)
        self.layer_norm = Norm(config, model.hidden_size, model.layernorm_epsilon)
        self.activation = ACTIVATIONS[model.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        normed: Tensor = self.layer_norm(self.activation(self.dense(hidden)))
        return normed


class Pooler(torch.nn.Module):
    """A summary of each row: dense and tanh on its first token."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create the weights, not yet filled."""
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.dense = _linear(model.hidden_size, model.hidden_size, config, sees_part_of_sequence=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [b, h], the same on all tensor-parallel ranks, which must all call."""
        first = hidden[:1]
        if self.sequence_parallel:
            # Only the first row of each rank travels; that of rank 0 is the first of the sequence.
            first = _whole_sequence(first.contiguous())
        return torch.tanh(self.dense(first[0]))


class Classifier(MegatronModule):
    """Logits of the classes (or values of a regression) of a row, from its summary, or of each token.

    For questions: how well an answer may start or end at a token.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create the weights, not yet filled."""
        super().__init__(config=config)
        # Hugging Face's head for questions has no dropout.
        self.dropout = torch.nn.Dropout(0.0 if model.task == "question_answering" else model.classifier_dropout)
        of_tokens = model.task != "sequence_classification"
        self.dense = _linear(model.hidden_size, model.num_labels, config, sees_part_of_sequence=of_tokens)
        self.is_split: bool = config.sequence_parallel and of_tokens

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] -> [..., num_labels], from [s/tp, b, h] [s, b, num_labels]; all tensor-parallel ranks must call."""
        drops = self.training and self.dropout.p > 0.0
        # Ranks with other tokens must draw other masks; those with the same summary of a row must drop the same of it.
        with get_cuda_rng_tracker().fork() if self.is_split and drops else contextlib.nullcontext():
            dropped = self.dropout(hidden)
        logits: Tensor = self.dense(dropped)
        return _whole_sequence(logits) if self.is_split else logits
