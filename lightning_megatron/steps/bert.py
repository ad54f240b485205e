"""Objectives of BERT: masked tokens and the order of sentences, and four kinds of fine-tuning.

Each target has a weight in a prepared tensor called ``..._mask``, 0 for none; sums are over weights, so any cut of a
batch into rows gives the same means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Accuracy, F1Score, MeanSquaredError, Metric

from lightning_megatron.engine.schedule import Batch, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError, DataError, require_choice
from lightning_megatron.models.config import ModelConfig, ProblemType
from lightning_megatron.steps import base
from lightning_megatron.steps.gpt import MaskedLossStep

MEGATRON_NAMES = {
    "text": "input_ids",
    "types": "token_type_ids",
    "padding_mask": "attention_mask",
    "is_random": "next_sentence_label",
}
"""What Megatron's indexed samples call what Hugging Face calls otherwise."""

_READ = ("attention_mask", "token_type_ids", "position_ids")
"""What the model reads beside the tokens."""


class _Head(NamedTuple):
    """The labels of a loss term."""

    labels: str
    """Their key in a batch."""
    targets: str = "targets"
    """Their key in a prepared batch."""
    mask: str = "loss_mask"
    """That of their weights."""
    of_tokens: bool = False
    """Whether each token has one, not each row."""


_HEADS: dict[str, dict[str, _Head]] = {
    "pretraining": {
        "lm_loss": _Head("labels", of_tokens=True),
        "sop_loss": _Head("next_sentence_label", "order", "order_mask"),
    },
    "masked_lm": {"lm_loss": _Head("labels", of_tokens=True)},
    "sequence_classification": {"label_loss": _Head("labels")},
    "token_classification": {"label_loss": _Head("labels", of_tokens=True)},
    "question_answering": {
        "start_loss": _Head("start_positions", "start", "start_mask"),
        "end_loss": _Head("end_positions", "end", "end_mask"),
    },
}
"""The loss terms of each task. All but ``lm_loss``, which the model gives, are of a softmax, or as ``problem_type``."""

_OPTIONAL = {"token_classification": ("loss_mask",)} | dict.fromkeys(
    ("pretraining", "masked_lm"), ("loss_mask", "truncated", "next_sentence_label")
)
"""Keys that a batch may have, by task."""


class BertTrainStep(MaskedLossStep):
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

    architecture = "bert"

    def __init__(self, binary_head: bool = True) -> None:
        """Choose what pretraining learns.

        Args:
            binary_head: Whether pretraining learns the order of sentences too; other tasks do not look at it.
        """
        self.binary_head = binary_head

    def bind(self, model: ModelConfig) -> None:
        """Choose the objective by the model's task.

        Raises:
            ConfigError: If the model is no BERT, or its head has another width than its task needs.
        """
        super().bind(model)
        self._heads = {name: h for name, h in _HEADS[model.task].items() if self.binary_head or name != "sop_loss"}
        self.loss_terms = tuple(self._heads)  # type: ignore[misc]
        self.masks = {name: head.mask for name, head in self._heads.items()}
        is_of_rows, n = model.task == "sequence_classification", model.num_labels
        self._problem: ProblemType | None = model.problem_type if is_of_rows else "single_label_classification"
        if self._problem is not None:
            require_choice("problem_type", self._problem, get_args(ProblemType))
        if "label_loss" in self._heads and self._problem == "single_label_classification" and n < 2:
            raise ConfigError(
                f"num_labels={n} leaves nothing to choose for task={model.task!r}; use num_labels=2, or "
                "problem_type='regression' for one value"
            )
        if model.task == "question_answering" and n != 2:
            raise ConfigError(f"num_labels={n} for task='question_answering'; use num_labels=2")

    def _problem_of(self, labels: Tensor) -> ProblemType:
        """Told by the config, else by the first batch, as Hugging Face's ``MegatronBertForSequenceClassification``."""
        if self._problem is not None:
            return self._problem
        if self.model.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

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
        tokens = named["input_ids"]
        base.check_tokens("input_ids", tokens, self.model)
        base.check_token_inputs(named, tokens.shape[0], tokens.shape[1], self.model)
        self._check_first_tokens(named)
        for head in self._heads.values():
            self._check_labels(head, named)
        if "attention_mask" in named and bool((named["attention_mask"] == 1).all()):
            del batch["attention_mask" if "attention_mask" in batch else "padding_mask"]

    def _check_first_tokens(self, named: Batch) -> None:
        reads_first_token = self.model.task == "sequence_classification" or "sop_loss" in self._heads
        if not reads_first_token or "attention_mask" not in named:
            return
        counted = named["sample_mask"] != 0 if "sample_mask" in named else True
        padded = (named["attention_mask"][:, 0] == 0) & counted
        if padded.any():
            raise DataError(
                f"attention_mask[{int(padded.nonzero()[0])}, 0] is 0, and the head reads that token; pad on the right"
            )

    def _check_labels(self, head: _Head, named: Batch) -> None:
        name, labels, model = head.labels, named[head.labels], self.model
        (rows, length), n = named["input_ids"].shape, model.num_labels
        if (problem := self._problem_of(labels)) != "single_label_classification":
            rule = f"num_labels={n}, problem_type={problem!r}"
            if not labels.is_floating_point():
                raise DataError(f"{name} is {labels.dtype} and must be a float type ({rule}); use {name}.float()")
            base.check_values(name, labels, labels.isfinite(), "finite")
            base.check_shape(name, labels, rule, (rows, n), *([(rows,)] if n == 1 else []))
            if problem == "multi_label_classification":
                base.check_values(name, labels, (labels >= 0) & (labels <= 1), f"in 0..1 ({rule})")
            return
        shapes = [(rows, length)] if head.of_tokens else [(rows,), (rows, 1)]
        base.check_integers(name, labels, f"one for each {'token' if head.of_tokens else 'row'}", *shapes)
        if name == "labels" and model.has_output_layer:
            counted = labels.masked_fill(named["loss_mask"] == 0, base.IGNORE_INDEX) if "loss_mask" in named else labels
            base.check_range(name, counted, model.vocab_size, "vocab_size", base.IGNORED_LABELS)
        elif name == "labels":
            base.check_range(name, labels, n, "num_labels", base.IGNORED_LABELS)
        elif name == "next_sentence_label":
            base.check_range(name, labels, 2, "kinds of order", base.IGNORED_LABELS)

    def prepare_batch(self, batch: Batch) -> Batch:
        """``tokens`` [b, s] int64, the user's mask, token types and positions, and the targets with their masks.

        Raises:
            DataError: If there are keys that it does not understand.
        """
        named = self._named(batch)
        prepared = {"tokens": named["input_ids"].long(), **{n: named[n].long() for n in _READ if n in named}}
        for head in self._heads.values():
            labels, length = named[head.labels], named["input_ids"].shape[1]
            self._problem = self._problem_of(labels)
            if self._problem == "single_label_classification":
                labels = labels.long() if head.of_tokens else labels.long().reshape(-1)
                if self.model.task == "question_answering":
                    # What lies before the row counts as its start, what lies after it is ignored: Hugging Face's rule.
                    labels = labels.clamp(min=0).masked_fill(labels >= length, base.IGNORE_INDEX)
                targets, counted = labels.clamp(min=0), labels >= 0
            else:
                targets = labels.float().reshape(-1, self.model.num_labels)
                counted = torch.ones_like(targets)
            prepared |= {head.targets: targets, head.mask: base.target_weights(counted, named)}
        return prepared

    def _named(self, batch: Batch) -> Batch:
        """The batch by Hugging Face's names."""
        task = self.model.task
        needed = dict.fromkeys(("input_ids", *(head.labels for head in self._heads.values())), "")
        if "next_sentence_label" in needed:
            needed["next_sentence_label"] = ", or use BertTrainStep(binary_head=False)"
        known = {*_READ, "sample_mask", *needed, *_OPTIONAL.get(task, ())}
        return base.rename_keys(batch, known, needed, f"BertTrainStep for task {task!r}", MEGATRON_NAMES)

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Output, LossFunc]:
        """What ``BertChunk.forward`` returns: losses or logits on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        mask = batch.get("attention_mask")
        if mask is not None and self.model.task == "question_answering":
            # The softmax is over padding, too. Segments let it see padding, Hugging Face the tokens.
            mask = (mask == 0)[:, None, None, :]
        labels = batch["targets"] if self.model.has_output_layer else None
        output = model(batch["tokens"], batch.get("position_ids"), mask, batch.get("token_type_ids"), labels=labels)
        return output, partial(self.loss_func, batch)

    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """The terms of the class's table.

        Args:
            batch: The prepared microbatch.
            output: What ``BertChunk.forward`` returned.
        """
        terms = {}
        for (name, head), found in zip(self._heads.items(), self._of_heads(output), strict=False):
            losses = found if name == "lm_loss" else self._losses(found.float(), batch[head.targets])
            terms[name] = base.loss_term(losses, batch[head.mask])
        if self.model.task == "pretraining" and "sop_loss" not in terms:
            # Its weights must have a gradient, if only zero: the engine waits for that of every weight.
            unused = 0.0 * output[1].float().sum()
            terms["lm_loss"] = terms["lm_loss"]._replace(sum=terms["lm_loss"].sum + unused)
        return terms

    def _of_heads(self, output: Output) -> tuple[Tensor, ...]:
        """The losses of tokens [b, s], or logits [b, n] or [b, s, n], of each term."""
        if self.model.task == "question_answering":
            return output.unbind(-1)  # type: ignore[no-any-return]
        return output if isinstance(output, tuple) else (output,)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._problem == "regression":
            return (logits - targets).square()
        if self._problem == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
        return 0.5 * losses if self.model.task == "question_answering" else losses

    def metrics(self) -> dict[str, Metric]:
        """Masked tokens: ``perplexity`` and ``sop_accuracy``; labels: ``accuracy`` and ``f1`` (regression: ``mse``).

        For questions ``exact_match``: how often both the start and the end are right.
        """
        n, heads = self.model.num_labels, self._heads
        if "lm_loss" in heads:
            return {**super().metrics(), **({"sop_accuracy": base.WeightedMean()} if "sop_loss" in heads else {})}
        if "start_loss" in heads:
            return {"exact_match": base.WeightedMean()}
        if self._problem == "regression" or (self._problem is None and n == 1):
            return {"mse": MeanSquaredError()}
        if self._problem != "multi_label_classification":
            options: dict[str, Any] = {"task": "multiclass", "num_classes": n, "ignore_index": base.IGNORE_INDEX}
            options["validate_args"] = False
            return {"accuracy": Accuracy(**options, average="micro"), "f1": F1Score(**options, average="macro")}
        options = {"task": "multilabel" if n > 1 else "binary", "num_labels": n, "average": "macro"}
        return {"accuracy": Accuracy(**options), "f1": F1Score(**options)}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in the targets of one microbatch; what carries no loss does not count."""
        if "lm_loss" in self._heads:
            super().update_metrics(metrics, batch, output[0])
            if "sop_loss" in self._heads:
                metrics["sop_accuracy"].update(output[1].argmax(-1) == batch["order"], batch["order_mask"] > 0)
        elif "start_loss" in self._heads:
            places = output.argmax(1)
            right = (places[:, 0] == batch["start"]) & (places[:, 1] == batch["end"])
            metrics["exact_match"].update(right, (batch["start_mask"] > 0) & (batch["end_mask"] > 0))
        else:
            self._update_metrics_of_labels(metrics, batch, output)

    def _update_metrics_of_labels(self, metrics: Mapping[str, Metric], batch: Batch, output: Tensor) -> None:
        targets, counted = batch["targets"], batch["loss_mask"] > 0
        if self._problem == "single_label_classification":
            found, wanted = output.flatten(0, -2).float(), targets.masked_fill(~counted, base.IGNORE_INDEX).flatten()
        elif not counted.any():
            return
        elif self._problem == "regression":
            found, wanted = output[counted].float(), targets[counted]
        else:  # not logits: torchmetrics takes those that all lie in 0..1 for probabilities
            rows = counted[:, 0]
            found, wanted = (output[rows] > 0).long(), (targets[rows] > 0.5).long()
        for metric in metrics.values():
            metric.update(found, wanted)
