"""Can this run work at all? Everything that is knowable before a process, a process group or a file is created."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_megatron.accounting import total_parameters
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.datamodules.base import MegatronDataModule
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.strategy import MegatronStrategy


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse Trainer options that Megatron's engine cannot honour.

    Raises:
        ConfigError: With the option, the reason and what to use instead.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not work with MegatronStrategy, whose "
            "batches are whole optimizer steps; use MegatronStrategy(num_microbatches="
            f"{trainer.accumulate_grad_batches}) and a batch_size that many times as large"
        )
    algorithm = trainer.gradient_clip_algorithm
    if (
        trainer.gradient_clip_val
        and algorithm is not None
        and str(algorithm) not in ("norm", "GradClipAlgorithmType.NORM")
    ):
        raise ConfigError(
            f"gradient_clip_algorithm={str(algorithm)!r} is not supported: Megatron clips by global norm; use 'norm'"
        )

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _check_callback(callback)


def _check_callback(callback: Callback) -> None:
    """Refuse Lightning's callbacks that would do something else here than they promise, most of them silently.

    Raises:
        ConfigError: With the callback, the reason and what to use instead.
    """
    name = type(callback).__name__
    if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
        raise ConfigError(
            f"{name} does not work with MegatronStrategy, whose batches are whole optimizer steps; use "
            "MegatronStrategy(num_microbatches=...) and a larger batch_size"
        )
    if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
        raise ConfigError(
            f"{name} copies the module before its weights exist, and would average nothing; remove it, and average "
            "checkpoints instead"
        )
    if isinstance(callback, BaseFinetuning):
        raise ConfigError(
            f"{name} adds parameters to the optimizer while training, and Megatron's buffers are laid out once; freeze "
            "with requires_grad_(False) in configure_model, and unfreeze between two runs of fit, instead"
        )


def _check_data(strategy: MegatronStrategy, model: pl.LightningModule, datamodule: MegatronDataModule) -> None:
    """Check the samples against model and layout.

    Raises:
        ConfigError: If settings do not fit together, or the data is missing, damaged or too small.
    """
    run = datamodule.run(model)
    for num_microbatches in run.shape.stages:
        replace(strategy.parallel, num_microbatches=num_microbatches)  # checks itself
    limit = None
    # Rotary positions and ALiBi go on where the table of learned ones ends.
    if run.model is not None and run.model.position_embedding_type == "learned_absolute":
        limit = run.model.max_position_embeddings
    for name, length in datamodule.lengths(run.model).items():
        strategy.parallel.check_sequence(length, limit, name=name)
        rows, microbatches = run.shape.micro_batch_size, max(run.shape.stages)
        needed, there = rows * microbatches * length * 8, _host_memory()
        if needed > there:
            raise ConfigError(
                f"micro_batch_size={rows} x num_microbatches={microbatches}: the tokens of one step take "
                f"{needed / 2**30:,.0f} GiB, and this host has {there / 2**30:,.0f} GiB; correct them"
            )
    environment = strategy.cluster_environment
    # Where all processes exist already, one looks at the files in setup() and tells the others what it found.
    if environment is None or not environment.creates_processes_externally:
        datamodule.check(run)


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(strategy: MegatronStrategy, model: ModelConfig) -> None:
    """Refuse weights alone that the host cannot hold; a GPU refuses by itself, Linux kills whoever asks for too much.

    Raises:
        ConfigError: With both sizes.
    """
    if strategy.root_device.type != "cpu":
        return
    count = total_parameters(model)
    ranks = strategy.num_processes
    needed = count // strategy.parallel.model_parallel_size * ranks * strategy.settings.dtypes.params.itemsize
    there = _host_memory()
    if needed > there:
        raise ConfigError(
            f"the weights of this model ({count:,} parameters) take {needed / 2**30:,.0f} GiB on the {ranks} ranks of "
            f"this host, which has {there / 2**30:,.0f} GiB; correct the sizes in the model's config, or use more hosts"
        )


def preflight(trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None) -> None:
    """Check the parts of a run against each other; does nothing for other strategies. No communication.

    Raises:
        ConfigError: The first thing that cannot work.
    """
    from lightning_megatron.datamodules.base import MegatronDataModule
    from lightning_megatron.module import MegatronModule
    from lightning_megatron.strategy import MegatronStrategy

    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        return
    check_trainer(trainer)
    if not model.automatic_optimization:
        raise ConfigError(
            "automatic_optimization=False does not work with MegatronStrategy, whose training_step runs all backward "
            "passes of a step; leave it True, and override TrainStep's loss_func for a loss of your own"
        )
    if isinstance(model, MegatronModule):
        _check_memory(strategy, model.model_config)
        model.check(strategy.parallel)
    if isinstance(datamodule, MegatronDataModule):
        datamodule.trainer = trainer  # as Trainer.fit does; a data module asks its Trainer what is to be run
        _check_data(strategy, model, datamodule)
