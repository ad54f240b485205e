"""``HarnessEvaluation``: tasks of EleutherAI's lm_eval while a model trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.callbacks.intervals import check_interval, is_due
from lightning_megatron.callbacks.throughput import interrupt_clocks
from lightning_megatron.engine.collectives import call_on_all_ranks
from lightning_megatron.errors import as_options
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.harness import HarnessOptions

if TYPE_CHECKING:
    from lightning_megatron.harness.model import MegatronLM
    from lightning_megatron.harness.tasks import LoadedTasks


@checks_options
class HarnessEvaluation(Callback):
    """Evaluates a GPT on tasks of lm_eval every few steps, with its current weights, without an effect on training.

    Logs each metric as ``task/metric`` (``task/metric_filter`` for results of a filter): to the loggers, and for
    callbacks that monitor a metric. All ranks compute together, and the tasks are loaded on each, from its disk only,
    before training begins. Needs the extra ``lightning-megatron[eval]``.
    """

    def __init__(
        self,
        tokenizer: str | Path | Any,
        harness: HarnessOptions | dict[str, Any],
        every_n_steps: int,
        batch_size: int = 8,
        max_length: int | None = None,
    ) -> None:
        """Set the tasks.

        Args:
            tokenizer: Directory of a transformers tokenizer, its name on the Hugging Face hub, or the tokenizer itself.
            harness: The tasks, and how they are evaluated.
            every_n_steps: Optimizer steps between evaluations.
            batch_size: Rows in a forward pass of a data-parallel replica.
            max_length: Tokens that the model reads at most; None for its ``max_position_embeddings``.

        Raises:
            ConfigError: If an option is wrong.
        """
        check_interval(every_n_steps)
        self.tokenizer = tokenizer
        self.harness = as_options(HarnessOptions, harness, "harness")
        self.every_n_steps = every_n_steps
        self.batch_size = batch_size
        self.max_length = max_length
        self._model: MegatronLM | None = None
        self._loaded: LoadedTasks | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the tasks and the tokenizer.

        Raises:
            ConfigError: If lm_eval is missing, the model is no GPT with an output layer, or a task cannot be loaded.
        """
        if stage == "fit":
            self._model, self._loaded = call_on_all_ranks(lambda: self._load(pl_module))

    def _load(self, module: LightningModule) -> tuple[MegatronLM, LoadedTasks]:
        # An extra, whose import takes seconds.
        from lightning_megatron.harness.model import MegatronLM
        from lightning_megatron.harness.tasks import load_tasks

        model = MegatronLM(
            module,
            self.tokenizer,
            batch_size=self.batch_size,
            max_length=self.max_length,
        )
        return model, load_tasks(self.harness)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Evaluate if it is due."""
        if not is_due(trainer, self.every_n_steps):
            return
        from lightning_megatron.harness.evaluation import evaluate_tasks, metrics_of

        assert self._model is not None
        assert self._loaded is not None
        results = evaluate_tasks(
            self._model,
            self._loaded,
            self.harness,
            is_main=trainer.is_global_zero,
        )
        interrupt_clocks(trainer)
        _log(trainer, pl_module, metrics_of(results))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the datasets, and the model."""
        self._model = None
        self._loaded = None


def _log(trainer: Trainer, module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Log metrics at the current step, whatever the Trainer's ``log_every_n_steps``."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
    for name, value in metrics.items():
        module.log(name, torch.tensor(value), logger=False, batch_size=1)
