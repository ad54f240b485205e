"""Train step of distillation: a student learns the probabilities of a frozen teacher with the same vocabulary.

The teacher is cut like the student. Before each step its forward pass goes through the same pipeline, and the last
stage keeps its last hidden states; its logits are computed from them where the student's are, one microbatch at a time.
Hidden states are v / h times smaller than logits (v vocabulary, h width), of which a step would otherwise keep those of
all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.objective import Batch, FrozenPass, LossFunc, LossTerm, Output
from lightning_megatron.engine.ops.distillation import token_divergences, token_top_divergences
from lightning_megatron.engine.ops.loss import token_losses
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError, DataError, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.gpt import GPTTrainStep

_TOP = ("teacher_ids", "teacher_logits")
"""Keys of a teacher's top-k logits in a batch."""
_HIDDEN = "teacher_hidden"


@checks_options
class DistillationTrainStep(GPTTrainStep):
    """Cross-entropy of the next token and divergence from a teacher (Hinton et al. 2015, arXiv 1503.02531).

    The loss of a target is ``(1 - alpha) * CE + alpha * temperature^2 * KL(teacher || student)``, averaged over the
    targets of the global batch; both distributions of the divergence are those of logits divided by ``temperature``.
    Besides the loss, training, validation and test log ``lm_loss`` (the cross-entropy) and ``kl_loss`` (the
    divergence) without their factors; the perplexity is that of the cross-entropy.

    Batches are those of ``GPTTrainStep``. Without a ``teacher`` they also have its k most likely tokens at each
    position, ``teacher_ids`` [b, s, k] (negative for fewer than k), and their logits, ``teacher_logits`` [b, s, k], at
    the positions of the tokens that predict, as a model's logits are. The teacher's probabilities are then those of
    these k tokens, and all others have none.

    Args:
        teacher: Directory of a GPT's Hugging Face weights, or its name on the hub; None for batches with its top-k
            logits. It has the student's vocabulary, and a depth and a width of its own. It is loaded at the layout of
            the run, in the same precision.
        temperature: The larger, the more the student learns of unlikely tokens.
        alpha: Weight of the teacher, from 0 to 1.
        eod_token: As for ``GPTTrainStep``, like the following three.
        reset_position_ids: Whether positions restart from 0 in each document.
        reset_attention_mask: Whether tokens attend only to their own document.
        eod_mask_loss: Whether to exclude the token after an end of document from the loss.
    """

    loss_terms = ("distillation_loss",)
    masks = {"distillation_loss": "loss_mask"}
    logged_terms = ("lm_loss", "kl_loss")

    def __init__(
        self,
        teacher: str | Path | None = None,
        temperature: float = 2.0,
        alpha: float = 0.5,
        eod_token: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
    ) -> None:
        """Set the options.

        Raises:
            ConfigError: If one is out of range.
        """
        super().__init__(
            eod_token=eod_token,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
        )
        require_number("temperature", temperature)
        if temperature == 0:
            raise ConfigError(f"temperature={temperature}: expected a positive number; use e.g. 2")
        require_number("alpha", alpha, at_most=1)
        self.teacher = teacher
        self.temperature = temperature
        self.alpha = alpha
        self._teacher_model: ModelConfig | None = None
        self._teacher_chunks: Sequence[torch.nn.Module] | None = None

    def bind_teacher(self, teacher: ModelConfig) -> None:
        """Set the config of the teacher; called once, after ``bind``.

        Raises:
            ConfigError: If it is no language model with the student's vocabulary.
        """
        if teacher.architecture != "gpt" or not teacher.has_output_layer:
            raise ConfigError(
                f"teacher={self.teacher}: expected a GPT that is a language model, got a {teacher.family} with "
                f"task={teacher.task!r}; give another"
            )
        if teacher.vocab_size != self.model.vocab_size:
            raise ConfigError(
                f"teacher={self.teacher}: expected the student's vocabulary of {self.model.vocab_size} tokens, got "
                f"{teacher.vocab_size}; give a teacher with the same tokenizer"
            )
        self._teacher_model = teacher

    def attach_teacher(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Set this rank's chunks of the teacher, as many as of the student."""
        self._teacher_chunks = chunks

    @override
    def check_batch(self, batch: Batch) -> None:
        """Check the batch as ``GPTTrainStep`` does, and what it has of a teacher.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not DistillationTrainStep.prepare_batch:
            return
        of_teacher, inputs = self._split(batch)
        self.check_inputs(inputs)
        for name in batch.keys() - inputs.keys() - of_teacher.keys():
            del batch[name]  # a mask without effect
        tokens = inputs.get("input_ids")
        shortest = 1
        if tokens is None:
            tokens = inputs["text"].clamp(min=0)
            shortest = 2
        if self._teacher_model is not None:
            batch_checks.check_tokens(
                "input_ids of the teacher", tokens, self._teacher_model, shortest=shortest
            )
        if of_teacher:
            length = tokens.shape[1] - shortest + 1
            _check_top(of_teacher, len(tokens), length, self.model)

    def _split(self, batch: Batch) -> tuple[Batch, Batch]:
        """What a batch has of a teacher, and the rest.

        Raises:
            DataError: If it has what this step does not take, or lacks what it needs.
        """
        of_teacher = {name: batch[name] for name in _TOP if name in batch}
        if self.teacher is None and len(of_teacher) < len(_TOP):
            raise DataError(
                f"batch: expected {' and '.join(_TOP)}, since teacher=None, got {', '.join(sorted(batch))}; add them, "
                "or give DistillationTrainStep(teacher=DIR)"
            )
        if self.teacher is not None and of_teacher:
            raise DataError(
                f"batch: {', '.join(of_teacher)} and teacher={self.teacher} both say what to learn; leave one of them "
                "out"
            )
        inputs = {name: value for name, value in batch.items() if name not in of_teacher}
        return of_teacher, inputs

    @override
    def prepare_batch(self, batch: Batch) -> Batch:
        """Return what ``GPTTrainStep`` returns, and the teacher's top-k logits if the batch has them.

        Raises:
            DataError: If a key is unknown or missing.
        """
        of_teacher, inputs = self._split(batch)
        prepared = super().prepare_batch(inputs)
        if of_teacher:
            prepared["teacher_ids"] = of_teacher["teacher_ids"].long()
            prepared["teacher_logits"] = of_teacher["teacher_logits"].float()
        return prepared

    @override
    def frozen_pass(self, batch: Batch) -> FrozenPass | None:
        """Return the teacher's forward pass.

        Raises:
            RuntimeError: If the module has not built it.
        """
        if self.teacher is None:
            return None
        if self._teacher_chunks is None:
            raise RuntimeError("the teacher is not built; call super().configure_model() in yours")
        return FrozenPass(
            forward=_hidden_states,
            results=lambda batch, output: {_HIDDEN: output},
            chunks=self._teacher_chunks,
        )

    @override
    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Tensor, LossFunc]:
        """Run a microbatch: cross-entropy and divergence, [b, s, 2], on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch["targets"],
            loss_of_logits=partial(self._losses, batch, unwrap(model)),
        )
        return output, partial(self.loss_func, batch)

    def _losses(
        self,
        batch: Batch,
        student: Any,
        logits: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Cross-entropy and divergence of each token: [b, s/cp, 2], fp32.

        Args:
            batch: The prepared microbatch.
            student: The unwrapped chunk.
            logits: [s/cp, b, v/tp].
            labels: [b, s/cp].
        """
        group = student.pg_collection.tp
        targets = labels.transpose(0, 1).contiguous()
        cross_entropy = token_losses(logits, targets, group)
        if _HIDDEN in batch:
            assert self._teacher_chunks is not None
            teacher = unwrap(self._teacher_chunks[-1])
            with torch.no_grad():
                goals = teacher.vocab_logits(batch[_HIDDEN])
            divergences = token_divergences(logits, goals, self.temperature, group)
        else:
            ids, goals = (
                student.own_tokens(batch[name]).transpose(0, 1).contiguous() for name in _TOP
            )
            divergences = token_top_divergences(logits, ids, goals, self.temperature, group)
        both = torch.stack([cross_entropy, divergences], dim=-1)
        return both.transpose(0, 1).contiguous()

    @override
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the weighted sums of the loss, of the cross-entropy and of the divergence.

        Args:
            batch: The prepared microbatch.
            output: Cross-entropy and divergence of each token, [b, s, 2].
        """
        cross_entropy, divergence = output.unbind(dim=-1)
        of_teacher = self.alpha * self.temperature**2 * divergence
        values = {
            "distillation_loss": (1 - self.alpha) * cross_entropy + of_teacher,
            "lm_loss": cross_entropy,
            "kl_loss": divergence,
        }
        return {name: base.loss_term(value, batch["loss_mask"]) for name, value in values.items()}

    @override
    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        super().update_metrics(metrics, batch, output[..., 0])


def _hidden_states(batch: Batch, model: torch.nn.Module) -> Tensor:
    """Hidden states of a teacher's chunk, on the last stage behind the final norm: [s/cp or s/cp/tp, b, h]."""
    hidden: Tensor = unwrap(model).hidden_states(
        batch["tokens"],
        batch.get("position_ids"),
        batch.get("attention_mask"),
    )
    return hidden


def _check_top(
    of_teacher: Batch,
    rows: int,
    length: int,
    model: ModelConfig,
) -> None:
    """Check a teacher's top-k logits.

    Raises:
        DataError: If a shape is not [rows, length, k], a token is not in the vocabulary, or a position has no token.
    """
    ids, logits = (of_teacher[name] for name in _TOP)
    has_rows = tuple(ids.shape[:2]) == (rows, length)
    if ids.dim() != 3 or not has_rows or ids.shape[2] == 0:
        raise DataError(
            f"teacher_ids: expected the shape [{rows}, {length}, k], one row of tokens per position, got "
            f"{list(ids.shape)}; correct it"
        )
    batch_checks.check_shape("teacher_logits", logits, "one per token", tuple(ids.shape))
    batch_checks.check_integers("teacher_ids", ids, "token ids")
    is_valid = ids < model.vocab_size
    rule = f"below vocab_size={model.vocab_size}"
    batch_checks.check_values("teacher_ids", ids, is_valid, rule)
    is_finite = logits.isfinite() | (ids < 0)
    batch_checks.check_values("teacher_logits", logits, is_finite, "finite")
    has_token = (ids >= 0).any(dim=-1)
    if not has_token.all():
        row, place = has_token.logical_not().nonzero()[0].tolist()
        raise DataError(
            f"teacher_ids[{row}, {place}]: expected at least one token, got negative ids alone; give the most likely "
            "one at every position"
        )
