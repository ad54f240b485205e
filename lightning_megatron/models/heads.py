"""Heads of classification tasks: logits of labels from the hidden states of BERTs and GPTs.

With sequence parallelism a rank has a shard of the sequence. A head that reads every token runs on the shard, and the
gradients of its weights are summed over the tp group (``sequence_parallel``); a head that reads one token of each row
gets the same input on every rank.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lightning_megatron.engine.ops.random_state import forked
from lightning_megatron.models.config import ModelConfig


def gather_sequence(shard: Tensor) -> Tensor:
    """All-gather shards [s/tp, ...] of the sequence to [s, ...]. Collective over the tp group.

    All ranks compute the same with it, so the backward pass takes a shard's gradient from its own rank, without a sum.
    """
    gathered: Tensor = gather_from_sequence_parallel_region(
        shard, tensor_parallel_output_grad=False
    )
    return gathered


def replicated_linear(
    rows: int,
    columns: int,
    config: TransformerConfig,
    *,
    has_bias: bool = True,
    on_sequence_shard: bool,
) -> torch.nn.Linear:
    """Create a linear layer with equal weights on all ranks of the tp group.

    Args:
        rows: Input size.
        columns: Output size.
        config: Megatron's config of the model.
        has_bias: Whether it has a bias.
        on_sequence_shard: Whether each rank calls it with its shard of the sequence, if sequences are sharded.
    """
    linear = torch.nn.Linear(rows, columns, bias=has_bias, dtype=config.params_dtype)
    for parameter in linear.parameters():
        # distributed/finalize_model_grads.py sums these gradients over TP, as each rank saw a shard of the sequence.
        parameter.sequence_parallel = config.sequence_parallel and on_sequence_shard  # type: ignore[attr-defined]
    return linear


class Classifier(MegatronModule):
    """Classification head: logits (or regression values) of a row from its pooled representation, or of each token.

    For question answering, the two logits of a token score it as start and as end of the answer.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create uninitialized weights."""
        super().__init__(config=config)
        probability = model.classifier_dropout
        if model.task == "question_answering":  # Hugging Face's head for it has no dropout
            probability = 0.0
        self.dropout = torch.nn.Dropout(probability)
        per_token = model.task != "sequence_classification"
        self.dense = replicated_linear(
            model.hidden_size,
            model.num_labels,
            config,
            has_bias=model.classifier_bias,
            on_sequence_shard=per_token,
        )
        # By this name, so that inference turns it off with the layers' own (generate/inference_mode.py).
        self.sequence_parallel: bool = config.sequence_parallel and per_token

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] -> [..., num_labels], or [s/tp, b, h] -> [s, b, num_labels]. Collective over the tp group."""
        forks = self.sequence_parallel and self.training and self.dropout.p > 0.0
        # Dropout masks must differ between ranks with different tokens, and agree on ranks with the same pooled rows.
        with forked(forks):
            dropped = self.dropout(hidden)
        logits: Tensor = self.dense(dropped)
        if self.sequence_parallel:
            logits = gather_sequence(logits)
        return logits


def mark_last_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mark the last token of each row that is not padding: [b, s] bool, once True a row (the first if all is padding).

    transformers pools the last token that is not ``pad_token_id`` instead, which is the same one if all padding, and
    nothing else at a row's end, is that token.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 0 for padding; None for no padding.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    if attention_mask is None:
        return (positions == len(positions) - 1).expand_as(input_ids)
    last = (positions * (attention_mask != 0)).amax(dim=-1, keepdim=True)
    return positions == last


def pool_marked_tokens(hidden: Tensor, is_marked: Tensor) -> Tensor:
    """Hidden state of each row's marked token: [b, h], zeros for rows without one.

    Args:
        hidden: [s, b, h].
        is_marked: [b, s], bool; at most one True a row.
    """
    rows = torch.arange(len(is_marked), device=hidden.device)
    pooled = hidden[is_marked.long().argmax(dim=-1), rows]
    return pooled.masked_fill(~is_marked.any(dim=-1, keepdim=True), 0.0)
