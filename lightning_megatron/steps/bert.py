"""How does a BERT learn? Masked tokens and the order of sentences, and four kinds of fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torchmetrics import Metric

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch, LossFunc, LossTerm, Output, TrainStep, with_last_row_repeated
from lightning_megatron.steps.bert_labels import AnswerSpan, RowLabels, TokenLabels
from lightning_megatron.steps.bert_objectives import MaskedTokens, Objective
from lightning_megatron.steps.checks import check_integers, check_numbers, check_shape

_MEGATRON_NAMES = {
    "text": "input_ids",
    "types": "token_type_ids",
    "padding_mask": "attention_mask",
    "is_random": "next_sentence_label",
}
"""What Megatron's indexed samples call what Hugging Face calls otherwise."""

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "sample_mask")


class BertTrainStep(TrainStep):
    """The objective of a BERT's task, each term a mean over its targets in the global batch.

    Inputs are Hugging Face's, [b, s] each: ``input_ids`` and, optionally, ``attention_mask`` (1 for tokens and 0 for
    padding; or numbers of segments that do not see each other), ``token_type_ids``, ``position_ids``; or Megatron's
    ``text``, ``padding_mask``, ``types``. Any batch may carry ``sample_mask`` [b]: the loss of a row counts this much.

    ==========================  =======================================================================================
    ``pretraining``             ``lm_loss`` of ``labels`` [b, s] and ``sop_loss`` of ``next_sentence_label`` (or
                                ``is_random``) [b]
    ``masked_lm``               ``lm_loss`` of ``labels`` [b, s]
    ``sequence_classification``  ``label_loss`` of ``labels``: float [b] or [b, n] regression, int [b] classes, float
                                [b, n] several labels at once
    ``token_classification``    ``label_loss`` of ``labels`` [b, s]
    ``question_answering``      ``start_loss`` and ``end_loss`` of ``start_positions`` and ``end_positions`` [b], half
                                of the cross-entropies, so that their sum is Hugging Face's loss
    ==========================  =======================================================================================

    Labels of -100 (and -1, Megatron's) are no targets; ``loss_mask`` [b, s] weighs those of tokens.
    """

    def __init__(self, binary_head: bool = True) -> None:
        """Choose what pretraining learns.

        Args:
            binary_head: Whether pretraining learns the order of sentences too; other tasks do not look at it.
        """
        self.binary_head = binary_head
        self.objective: Objective | None = None

    def bind(self, model: ModelConfig) -> None:
        """Choose the objective by the model's task.

        Raises:
            ConfigError: If the model is no BERT, or its head has another width than its task needs.
        """
        if model.architecture != "bert":
            raise ConfigError(
                f"BertTrainStep trains BERTs, and {model.family} is a {model.architecture.upper()}; use "
                f"train_step={model.architecture!r}"
            )
        super().bind(model)
        self.objective = self._objective_of(model)
        self.loss_terms = self.objective.terms  # type: ignore[misc]

    def _objective_of(self, model: ModelConfig) -> Objective:
        if model.task == "sequence_classification":
            return RowLabels(model)
        if model.task == "token_classification":
            return TokenLabels(model)
        if model.task == "question_answering":
            return AnswerSpan(model)
        return MaskedTokens(model, has_order=model.task == "pretraining", learns_order=self.binary_head)

    @property
    def _bound(self) -> Objective:
        assert self.objective is not None, "the module binds its step before anything else"
        return self.objective

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and numbers out of range; drop a mask that hides nothing.

        Attention without a mask is faster, and on the host it costs nothing to see that there is none. A subclass that
        prepares batches in its own way is expected to have keys of its own, which are not looked at.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not BertTrainStep.prepare_batch:
            return
        named = self._named(batch)
        tokens, model = named["input_ids"], self.model
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise DataError(
                f"input_ids have the shape {list(tokens.shape)}; give them as [rows, tokens], at least one token each"
            )
        rows, length = tokens.shape
        if length > model.max_position_embeddings:
            raise DataError(
                f"input_ids have {length} tokens per row, more than max_position_embeddings="
                f"{model.max_position_embeddings}; cut the rows to {model.max_position_embeddings}"
            )
        limits = {
            "input_ids": (model.vocab_size, "vocab_size"),
            "token_type_ids": (max(model.num_tokentypes, 1), "type_vocab_size"),
            "position_ids": (model.max_position_embeddings, "max_position_embeddings"),
            "attention_mask": (None, ""),
        }
        for name, (limit, rule) in limits.items():
            if name in named:
                check_shape(name, named[name], (rows, length), "as input_ids")
                check_numbers(name, named[name], limit, rule)
        for name in ("input_ids", "token_type_ids", "position_ids"):
            if name in named:
                check_integers(name, named[name], "they number rows of a table")
        if "sample_mask" in named:
            check_shape("sample_mask", named["sample_mask"], (rows,), "one weight per row")
        self._check_mask(named)
        self._bound.check(named)
        if "attention_mask" in named and bool((named["attention_mask"] == 1).all()):
            del batch["attention_mask" if "attention_mask" in batch else "padding_mask"]

    def _check_mask(self, named: Batch) -> None:
        if "attention_mask" not in named:
            return
        mask = named["attention_mask"]
        if not torch.equal(mask.long().to(mask.dtype), mask):
            raise DataError(
                "attention_mask has fractions; give 1 for tokens and 0 for padding, or whole numbers of segments"
            )
        if not self._bound.reads_first_token:
            return
        counted = named["sample_mask"] != 0 if "sample_mask" in named else True
        padded = (named["attention_mask"][:, 0] == 0) & counted
        if padded.any():
            raise DataError(
                f"attention_mask[{int(padded.nonzero()[0])}, 0] is 0, but the head reads the first token of each row; "
                "pad on the right (padding_side='right')"
            )

    def prepare_batch(self, batch: Batch) -> Batch:
        """``tokens`` [b, s] int64, the user's mask, token types and positions, and the targets with their masks.

        Raises:
            DataError: If a key is missing or not understood.
        """
        named = self._named(batch)
        tokens = named["input_ids"].long()
        rows = named.get("sample_mask", tokens.new_ones(tokens.shape[0])).float()
        inputs: Batch = {n: named[n].long() for n in ("attention_mask", "token_type_ids", "position_ids") if n in named}
        return {"tokens": tokens, **inputs, **self._bound.targets(named, rows)}

    def _named(self, batch: Batch) -> Batch:
        """The batch by Hugging Face's names.

        Raises:
            DataError: If a key is missing, twofold or not understood.
        """
        labels = (*self._bound.needed, *self._bound.optional)
        known = {*_INPUTS, *labels}
        aliases = {alias for alias, name in _MEGATRON_NAMES.items() if name in known}
        named = {}
        for key, tensor in batch.items():
            name = _MEGATRON_NAMES.get(key, key)
            if name not in known:
                raise DataError(
                    f"batch key {key!r} is not understood by BertTrainStep for task {self.model.task!r}; use "
                    f"{', '.join(sorted(known | aliases))}, or override prepare_batch"
                )
            if name in named:
                raise DataError(f"batch keys {name!r} and {key!r} mean the same; leave one of them out")
            named[name] = tensor
        for name in ("input_ids", *self._bound.needed):
            if name not in named:
                raise DataError(
                    f"batch keys {', '.join(sorted(batch))} have no {name!r}, which task {self.model.task!r} needs; "
                    f"add it{self._bound.hint(name)}"
                )
        return named

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Repeat the last row without targets."""
        padded = with_last_row_repeated(batch, num_rows)
        for name in self._bound.masks:
            padded[name][batch[name].shape[0] :] = 0
        return padded

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row."""
        return batch["tokens"].shape[1]

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The number of targets of each term, known from the masks alone."""
        return self._bound.counts(batch)

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Output, LossFunc]:
        """What ``BertChunk.forward`` returns: losses or logits on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        mask = batch.get("attention_mask")
        if mask is not None and self._bound.reads_padding:
            # Segments let padding see padding. Hugging Face lets it see the tokens, and here its logits count.
            mask = (mask == 0)[:, None, None, :]
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            mask,
            batch.get("token_type_ids"),
            labels=self._bound.model_labels(batch),
        )
        return output, partial(self.loss_func, batch)

    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """The terms of the class's table.

        Args:
            batch: The prepared microbatch.
            output: What ``BertChunk.forward`` returned.
        """
        return self._bound.losses(batch, output)

    def metrics(self) -> dict[str, Metric]:
        """Masked tokens: ``perplexity`` and ``sop_accuracy``; labels: ``accuracy`` and ``f1`` (regression: ``mse``).

        For questions ``exact_match``: how often both the start and the end are right.
        """
        return self._bound.metrics()

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in the targets of one microbatch; what carries no loss does not count."""
        self._bound.update_metrics(metrics, batch, output)
