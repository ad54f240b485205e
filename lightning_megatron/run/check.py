"""The check before launch: Trainer, callbacks, loaders and number of processes.

What the module, its hooks and the data module check themselves is called from here, too. It runs before a process
group or a file exists: before other ranks are launched, or on each rank where they were started from outside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, callbacks
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import Dataset, IterableDataset

from lightning_megatron.errors import MOST_PROCESSES, ConfigError, require_number, type_of
from lightning_megatron.precision import check_clipping

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REFUSED_CALLBACKS: dict[type | tuple[type, ...], str] = {
    callbacks.GradientAccumulationScheduler: "does not work with MegatronStrategy, whose batches are whole optimizer "
    "steps; use MegatronStrategy(num_microbatches=...) and a larger batch_size",
    (
        callbacks.StochasticWeightAveraging,
        callbacks.WeightAveraging,
    ): "copies the module before its weights exist, and "
    "would average nothing; remove it, and use lightning_megatron.EMA(decay=0.999), or average checkpoints with "
    "lightning-megatron average",
    callbacks.ModelPruning: "masks whole weights, of which each rank has a shard, under names of its own; remove it",
    callbacks.BaseFinetuning: "adds parameters to the optimizer while training, and Megatron's buffers are laid out "
    "once; freeze with requires_grad_(False) in configure_model, and unfreeze between two runs of fit, instead",
}
"""Lightning callbacks that would not do what they promise here, most of them silently; and the reason."""


_THROUGHPUT = (
    "counts the batch of a replica once on each of its ranks, and adds them up; use "
    "lightning_megatron.ThroughputMonitor"
)
"""Why Lightning's ThroughputMonitor is refused where a replica has several ranks."""

_LEAST = {
    "max_steps": -1,
    "max_epochs": -1,
    "min_steps": -1,
    "min_epochs": -1,
    "log_every_n_steps": 0,
}
"""Least values of the Trainer's counts, of which it checks few; -1 is no limit."""


def check_trainer(trainer: pl.Trainer, *, is_replica_of_several: bool) -> None:
    """Refuse options and callbacks of ``trainer`` that Megatron's engine cannot honour.

    Args:
        trainer: The user's Trainer.
        is_replica_of_several: Whether a replica of the model has several ranks, with the same batch on each.

    Raises:
        ConfigError: For the first one found.
    """
    steps = trainer.accumulate_grad_batches
    if steps != 1:
        raise ConfigError(
            f"accumulate_grad_batches={steps}: expected 1, since a batch is a whole optimizer step; use "
            f"MegatronStrategy(num_microbatches={steps}) and a batch_size {steps} times as large"
        )
    for name, unit in (
        ("val_check_interval", "steps or a share of an epoch"),
        ("check_val_every_n_epoch", "epochs"),
    ):
        # Missing if the interval is a time, which each rank would measure by its own clock.
        if (value := getattr(trainer, name, "a time")) in (0, "a time"):
            raise ConfigError(
                f"{name}={value}: expected {unit}; use limit_val_batches=0 for no validation"
            )
    for name, at_least in _LEAST.items():
        value = getattr(trainer, name, None)
        if value is not None:
            require_number(name, value, at_least)
    # It would inspect uninitialized placeholders of gradients, and report their NaN.
    if trainer._detect_anomaly:
        raise ConfigError(
            "detect_anomaly=True: expected False, since gradients go to Megatron's buffers and not through autograd; "
            "use MegatronStrategy(on_nan='raise'), which names microbatch and rank"
        )
    check_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    _check_callbacks(trainer, is_replica_of_several=is_replica_of_several)


def _check_callbacks(trainer: pl.Trainer, *, is_replica_of_several: bool) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if is_replica_of_several and isinstance(callback, callbacks.ThroughputMonitor):
            raise ConfigError(f"{type(callback).__name__} {_THROUGHPUT}")
        accumulates = getattr(callback, "going_to_accumulate_grad_batches", None)
        if accumulates is not None and not accumulates():
            continue  # a GradientAccumulationScheduler without effect
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise ConfigError(f"{type(callback).__name__} {reason}")


def check_graph(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Refuse loggers that would trace the model: rank 0 alone would run it, and wait for the other ranks.

    Raises:
        ConfigError: If there is one, and the module has an ``example_input_array``, without which it traces nothing.
    """
    if model.example_input_array is None:
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise ConfigError(
                "TensorBoardLogger(log_graph=True): expected False, since rank 0 alone would run the model, of which "
                "other ranks hold parts; leave it out"
            )


def check_loaders(arguments: Mapping[str, Any]) -> None:
    """Refuse datasets where the Trainer's functions take loaders of batches, and data modules that are none.

    Args:
        arguments: Arguments of ``Trainer.fit``, ``validate``, ``test`` or ``predict``, by name.

    Raises:
        ConfigError: For the first one.
    """
    datamodule = arguments.get("datamodule")
    if datamodule is not None and not isinstance(datamodule, LightningDataModule):
        raise ConfigError(
            f"datamodule: expected a LightningDataModule, got {type_of(datamodule)}; pass loaders as train_dataloaders"
        )
    for name in ("train_dataloaders", "val_dataloaders", "dataloaders"):
        value = arguments.get(name)
        loaders = [value]
        if isinstance(value, Mapping):
            loaders = list(value.values())
        elif isinstance(value, (list, tuple)):
            loaders = list(value[:1])  # the first item of a dataset is enough
        for loader in loaders:
            if loader is not None and not _yields_batches(loader):
                what = type_of(value)
                if value is not loader:
                    what += f" of {type(loader).__name__}"
                fix = "give DataLoader(dataset, batch_size=...), or datamodule=DatasetDataModule(train=dataset)"
                raise ConfigError(f"{name}: expected a DataLoader, got {what}; {fix}")


def _yields_batches(loader: object) -> bool:
    """Whether an object can be a loader: iterable, and neither data itself nor a dataset of single samples."""
    if isinstance(loader, (Mapping, list, tuple, str, bytes, torch.Tensor)):
        return False
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    is_hugging_face = type(loader).__module__.partition(".")[0] == "datasets"
    return isinstance(loader, Iterable) and not is_dataset and not is_hugging_face


def check_world_size(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Check that as many processes have been, or can be, started as the run needs.

    Raises:
        ConfigError: If torchrun or a scheduler has started another number (some ranks would have no device, and the
            others would wait for them), a process group of another size exists, or this process would start other
            ranks but is interactive, without a script that they could run.
    """
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    is_module = sys.modules["__main__"].__spec__ is not None
    has_script = not is_interactive and (is_module or os.path.isfile(sys.argv[0]))
    if num_processes > MOST_PROCESSES and not environment.creates_processes_externally:
        raise ConfigError(
            f"devices={num_processes} must be at most {MOST_PROCESSES}; correct devices"
        )
    if num_processes > 1 and not has_script and not environment.creates_processes_externally:
        raise ConfigError(
            f"devices={num_processes} needs a script that each process runs, and this program has none (a notebook, "
            f"python -c); save it and run python FILE.py or torchrun --nproc-per-node {num_processes} FILE.py"
        )
    if dist.is_initialized() and dist.get_world_size() != num_processes * num_nodes:
        raise ConfigError(
            f"process group of this process: expected {num_processes * num_nodes} ranks for the run, got "
            f"{dist.get_world_size()}; start the run in a new process"
        )
    if isinstance(environment, LightningEnvironment):
        return
    if not environment.creates_processes_externally:
        return
    started = environment.world_size()
    if started != num_processes * num_nodes:
        raise ConfigError(
            f"processes: expected {num_processes * num_nodes} (devices={num_processes} x num_nodes={num_nodes}), got "
            f"{started}; start that many (torchrun --nproc-per-node {num_processes}), or change devices and num_nodes"
        )
