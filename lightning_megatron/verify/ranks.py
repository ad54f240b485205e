"""A layout on its ranks: what each computes of the job, through the Trainer, as a run would."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.convert.shards import Key
from lightning_megatron.convert.weight_gatherer import WeightGatherer
from lightning_megatron.engine.ops.xielu import CONSTANTS
from lightning_megatron.engine.optimizer_options import OptimizerOptions
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.module import MegatronModule
from lightning_megatron.strategy import MegatronStrategy
from lightning_megatron.verify.batch import (
    Batch,
    logits_inputs,
    make_batch,
    make_prompts,
    num_new_tokens,
    sampled,
)
from lightning_megatron.verify.job import Job, Progress, Result
from lightning_megatron.verify.layouts import Layout, parse_layout
from lightning_megatron.verify.source import round_trip

_PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-true"}
_PROGRESS_SECONDS = 10.0


def run_layout(folder: Path) -> None:
    """Compute the job of ``folder`` on this rank, or start all ranks of its layout; rank 0 writes the result."""
    job = Job.read(folder)
    assert job.layout is not None
    layout = parse_layout(job.layout)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    module = MegatronModule(
        model=job.directory,
        pretrained=True,
        lr=0.0,
        optimizer=OptimizerOptions(name="sgd", momentum=0.0, weight_decay=0.0),
    )
    module.model_config = without_randomness(module.model_config)
    batch = make_batch(job, module.model_config)
    observer = Observer(job, batch, folder)
    trainer = pl.Trainer(
        accelerator=job.accelerator,
        devices=layout.world_size,
        strategy=strategy_of(layout),
        precision=_PRECISIONS[job.dtype],
        callbacks=[observer],
        max_steps=1 + job.steps if "speed" in job.checks else 1,
        limit_val_batches=1 if not job.trains else 0,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = _loader(batch, layout)
    if job.trains:
        trainer.fit(module, loader)
    else:
        trainer.validate(module, loader, verbose=False)
    if trainer.is_global_zero:
        observer.result.write(folder)


def without_randomness(model: ModelConfig) -> ModelConfig:
    """The model without dropout, and without the load-balancing loss, which depends on the rows of a microbatch."""
    experts = model.experts
    if experts is not None:
        experts = replace(experts, load_balancing_loss_coef=0.0)
    return replace(
        model,
        embedding_dropout=0.0,
        hidden_dropout=0.0,
        attention_output_dropout=None,
        attention_dropout=0.0,
        activation_dropout=0.0,
        classifier_dropout=0.0,
        experts=experts,
    )


def strategy_of(layout: Layout) -> MegatronStrategy:
    """The strategy of a layout; every rank holds complete gradients of its shards."""
    parallel = layout.parallel
    return MegatronStrategy(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        sequence_parallel=parallel.sequence_parallel,
        num_microbatches=parallel.num_microbatches,
        distributed_optimizer=False,
    )


def _loader(batch: Batch, layout: Layout) -> DataLoader[Batch]:
    """Loader of one batch an epoch."""
    num_rows = len(batch["input_ids"])
    rows: Any = [{name: tensor[row] for name, tensor in batch.items()} for row in range(num_rows)]
    return DataLoader(rows, batch_size=num_rows // layout.dp)


class Observer(pl.Callback):
    """Records what the job asks for; learning rate 0 leaves the weights as they are."""

    def __init__(self, job: Job, batch: Batch, folder: Path) -> None:
        """Record into ``result``, which is complete on rank 0.

        Args:
            job: What to record.
            batch: The whole batch.
            folder: For progress.
        """
        self.result = Result()
        self._job = job
        self._batch = batch
        self._progress = Progress(folder)
        self._start = 0.0
        self._num_steps = 0
        self._reported = time.monotonic()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Say that the model is about to be built."""
        self._say(trainer, "loads the weights")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what needs no gradients."""
        self._observe(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what needs no gradients."""
        self._observe(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the loss."""
        self.result.loss = trainer.callback_metrics["val_loss"].item()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Start the clock of a step."""
        names = {0: "gradients", 1: f"speed of {self._job.steps} steps"}
        if self._num_steps in names:
            self._say(trainer, names[self._num_steps])
        self._start = self._now()

    @override
    def on_before_optimizer_step(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Record the time of a forward and backward pass, and the gradients of the first one."""
        seconds = self._now() - self._start
        if self._num_steps:  # the first one warms up
            self.result.seconds.append(seconds)
        elif "gradients" in self._job.checks:
            self._collect_gradients(pl_module)
        self._num_steps += 1

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Record the loss of the first step."""
        if self.result.loss is None:
            self.result.loss = outputs["loss"].item()

    def _observe(self, trainer: pl.Trainer, module: Any) -> None:
        job = self._job
        if "round-trip" in job.checks:
            self._say(trainer, "round trip")
            with module.megatron.engine():
                round_trip(
                    module.model_chunks,
                    module.model_config,
                    Path(job.directory),
                    self.result,
                    self._say_tensors,
                )
        with torch.no_grad():
            if "logits" in job.checks:
                self._say(trainer, "logits and loss")
                logits = module.logits(**logits_inputs(self._batch, module.model_config))
                self.result.logits = logits.float().cpu()
            if "generation" in job.checks:
                self._say(trainer, "generates")
                tokens = module.generate(
                    **make_prompts(self._batch),
                    max_new_tokens=num_new_tokens(job),
                    eos_token_id=(),
                    pad_token_id=0,
                )
                self.result.tokens = tokens.cpu()

    def _collect_gradients(self, module: Any) -> None:
        """Gather each gradient by its Hugging Face name, and keep its sampled elements. Collective over the world."""
        with module.megatron.engine(), gradients_as_weights(module.model_chunks):
            gatherer = WeightGatherer(module.model_chunks, module.model_config, _has_gradient)
            for name, tensor in gatherer.tensors():
                if tensor is not None:
                    self.result.shapes[name] = tuple(tensor.shape)
                    self.result.gradients[name] = sampled(name, tensor, self._job.samples)

    def _now(self) -> float:
        if self._job.accelerator == "gpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _say(self, trainer: pl.Trainer, text: str) -> None:
        if trainer.is_global_zero:
            self._progress.say(text)

    def _say_tensors(self, done: int, total: int) -> None:
        if time.monotonic() - self._reported > _PROGRESS_SECONDS:
            self._reported = time.monotonic()
            self._progress.say(f"round trip, {done:,} of {total:,} tensors")


def _has_gradient(key: Key) -> bool:
    """Whether a weight is trained by its gradient: biases that balance experts and constants of xIELU are not."""
    return not key.name.endswith(("router.expert_bias", *CONSTANTS))


@contextmanager
def gradients_as_weights(chunks: Any) -> Iterator[None]:
    """While active, the data of each parameter is its reduced gradient, for ``WeightGatherer``."""
    parameters = [each for each in chunks.parameters() if each.requires_grad]
    weights = [each.data for each in parameters]
    for parameter in parameters:
        # In the dtype of the weight: torch drops the hook that reduces the gradient of a parameter that changes it.
        parameter.data = parameter.main_grad.to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
