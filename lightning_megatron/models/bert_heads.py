"""What stands on top of a BERT's last layer? Small heads, the same on all tensor-parallel ranks.

With sequence parallelism a rank has a part of the sequence. A head that reads every token works on that part, so that
the gradients of its weights are sums over the ranks (``sequence_parallel``); a head that reads the first token reads it
on all ranks alike.
"""

from __future__ import annotations

import contextlib

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lightning_megatron.engine.fillers.norm import Norm
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.transformer_config import activation_function


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
        self.activation = activation_function(model.activation)

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


class RowClassifier(MegatronModule):
    """Logits of a row's classes (or values of a regression) from its summary."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create the weights, not yet filled."""
        super().__init__(config=config)
        self.dropout = torch.nn.Dropout(model.classifier_dropout)
        self.dense = _linear(model.hidden_size, model.num_labels, config, sees_part_of_sequence=False)

    def forward(self, pooled: Tensor) -> Tensor:
        """[b, h] -> [b, num_labels]."""
        # Outside the tracker's fork: all tensor-parallel ranks have the same summary and must drop the same of it.
        logits: Tensor = self.dense(self.dropout(pooled))
        return logits


class TokenClassifier(MegatronModule):
    """Logits of each token's classes; for questions, how well an answer may start or end there."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        """Create the weights, not yet filled."""
        super().__init__(config=config)
        # Hugging Face's head for questions has no dropout.
        self.dropout = torch.nn.Dropout(0.0 if model.task == "question_answering" else model.classifier_dropout)
        self.dense = _linear(model.hidden_size, model.num_labels, config, sees_part_of_sequence=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [b, s, num_labels], whole on all tensor-parallel ranks, which must all call."""
        split = self.config.sequence_parallel
        drops = self.training and self.dropout.p > 0.0
        # Each rank has other tokens and must draw other masks.
        with get_cuda_rng_tracker().fork() if split and drops else contextlib.nullcontext():
            dropped = self.dropout(hidden)
        logits: Tensor = self.dense(dropped)
        if split:
            logits = _whole_sequence(logits)
        return logits.transpose(0, 1).contiguous()
