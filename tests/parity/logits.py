"""What does the model answer? Whole logits of a few rows, from any layout and from Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.parity.sharding import Shard, shards
from tests.parity.training import Case, module_of, trainer_of

Rows = list[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one rank returned for some rows."""

    logits: torch.Tensor | None
    """[b, s, v/tp], fp32; None before the last stage."""
    tp_rank: int
    loss: float
    weights: list[Shard]


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
    keeping = _keeping_logits(options or {})
    module = module_of(case, train_step=keeping)
    trainer = trainer_of(case)
    trainer.validate(module, loader, verbose=False)
    weights = shards(module)
    with_loss = module_of(case, train_step=GPTTrainStep(**(options or {})))
    (metrics,) = trainer_of(case).validate(with_loss, loader, verbose=False)
    topology = trainer.strategy.topology
    return Answer(
        logits=torch.cat(keeping.logits) if keeping.logits else None,
        tp_rank=topology.tp_rank,
        loss=metrics["val_loss"],
        weights=weights,
    )


def _keeping_logits(options: dict[str, Any]) -> Any:
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm

    class KeepingLogits(GPTTrainStep):
        """Asks the model for logits instead of losses."""

        def __init__(self) -> None:
            super().__init__(**options)
            self.logits: list[torch.Tensor] = []

        def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunc]:
            batch = next(data_iterator)
            logits = model(batch["tokens"], batch.get("position_ids"), batch.get("attention_mask"))
            return logits, partial(self.loss_func, batch)

        def loss_func(self, batch: Batch, output: torch.Tensor) -> dict[str, LossTerm]:
            self.logits.append(output.float())
            return {"lm_loss": LossTerm(output.new_zeros(()).float(), batch["loss_mask"].sum())}

        def metrics(self) -> dict[str, Any]:
            return {}

        def update_metrics(self, metrics: Any, batch: Batch, output: Any) -> None:
            """There are none."""

    return KeepingLogits()
