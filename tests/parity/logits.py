"""Whole logits of a few rows, from any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.parity.hugging_face import tensors_of
from tests.parity.sharding import Tensors
from tests.parity.training import Case, module_of, trainer_of

Rows = list[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one rank returned for some rows."""

    logits: torch.Tensor | None
    """[b, s, v/tp], fp32; None before the last stage."""
    tp_rank: int
    loss: float
    weights: Tensors
    """By Hugging Face's names; on the first rank."""


def whole_logits(answers: list[Answer]) -> torch.Tensor:
    """[b, s, padded v], from the ranks of one copy of the model."""
    parts = sorted((a for a in answers if a.logits is not None), key=lambda a: a.tp_rank)
    return torch.cat([part.logits for part in parts if part.logits is not None], dim=-1)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def answer(case: Case, rows: Rows, options: dict[str, Any] | None = None) -> Answer:
    """Evaluate ``rows``, as one batch, with fresh weights: once for the logits, once for the loss.

    ``options`` are those of ``GPTTrainStep``.
    """
    from lightning_megatron import GPTTrainStep

    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows))  # type: ignore[arg-type]
    module = module_of(case, train_step=GPTTrainStep(**(options or {})))
    module.train_step = keeping = keeping_outputs(module.train_step)
    trainer = trainer_of(case)
    trainer.validate(module, loader, verbose=False)
    weights = tensors_of(module)
    with_loss = module_of(case, train_step=GPTTrainStep(**(options or {})))
    (metrics,) = trainer_of(case).validate(with_loss, loader, verbose=False)
    topology = trainer.strategy.topology
    return Answer(
        logits=torch.cat([logits for (logits,) in keeping.outputs]) if keeping.outputs else None,
        tp_rank=topology.tp_rank,
        loss=metrics["val_loss"],
        weights=weights,
    )


def keeping_outputs(train_step: Any) -> Any:
    """``train_step``, but the model is asked for logits and they are kept."""
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm

    step_class: Any = type(train_step)

    class KeepingOutputs(step_class):
        """Asks the model without labels."""

        def __init__(self) -> None:
            self.__dict__.update(train_step.__dict__)
            self.outputs: list[list[torch.Tensor]] = []

        def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[Any, LossFunc]:
            def without_labels(*args: Any, **kwargs: Any) -> Any:
                return model(*args, **{k: None if k == "labels" else v for k, v in kwargs.items()})

            output, _ = super().forward_step(data_iterator, without_labels)
            return output, partial(self.loss_func, {})

        def loss_func(self, batch: Batch, output: Any) -> dict[str, LossTerm]:
            parts = output if isinstance(output, tuple | list) else (output,)
            given = [part for part in parts if part is not None]
            self.outputs.append([part.float().cpu() for part in given])
            zero = torch.zeros((), device=given[0].device)
            return {name: LossTerm(zero, zero + 1) for name in self.loss_terms}

        def metrics(self) -> dict[str, Any]:
            return {}

        def update_metrics(self, metrics: Any, batch: Batch, output: Any) -> None:
            """There are none."""

    return KeepingOutputs()
