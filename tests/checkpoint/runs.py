"""A small training run on any layout, and all of its state that a resume must restore.

For rank functions: heavy imports happen inside the functions.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from tests import models

SEQ_LENGTH = 16
GLOBAL_BATCH = 8
NUM_SAMPLES = 40
"""Five steps an epoch."""
VOCAB_SIZE = 100

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    **models.GPT2,
    "vocab_size": VOCAB_SIZE,
    "n_positions": SEQ_LENGTH,
}
"""Dropout is transformers' default of 0.1."""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    **models.LLAMA,
    "vocab_size": VOCAB_SIZE,
}
LLAMA |= {"max_position_embeddings": SEQ_LENGTH, "intermediate_size": 64}  # fp8 can take half of it
EXPERT_BIAS: dict[str, Any] = {
    "transformer_config_overrides": {
        "moe_router_bias_update_rate": 0.05,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
}
"""Arguments of ``MegatronStrategy`` that balance expert load with a router bias."""
NO_DROPOUT = models.NO_DROPOUT


@dataclass(frozen=True, kw_only=True)
class Run:
    """Arguments of one ``trainer.fit`` of a test."""

    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``MegatronStrategy``; the default is two microbatches."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``Trainer``."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of ``GPT2``; a complete config if it has a ``model_type``."""
    module: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``MegatronModule``."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OptimizerOptions``."""
    indexed: str | Mapping[str, Any] | None = None
    """Arguments of ``data_module``, or the prefix of an indexed dataset; None for an ordinary ``DataLoader``."""
    data_module: str = "IndexedDataModule"
    loader: Callable[[int], Any] | None = None
    """Makes the training ``DataLoader`` for a data-parallel size; None for ``shuffled_loader``."""
    validate: bool = False
    """Whether to pass a validation ``DataLoader``."""
    ckpt_path: str | None = None
    """Checkpoint to resume from."""
    global_batch: int = GLOBAL_BATCH
    """Rows per step of ``indexed``; a ``loader`` sets its own."""
    seed: int = 7
    """Seed of weights, dropout and sample order."""

    def but(self, **changes: Any) -> Self:
        """Copy of this run with some fields changed; mappings are merged."""
        merged: dict[str, Any] = {
            name: {**(getattr(self, name) or {}), **value} if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return replace(self, **merged)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Steps and final state of a run on one rank."""

    steps: dict[int, dict[str, Any]]
    """By global step: loss, learning rates, weight decay, gradient norm and tokens."""
    state: dict[str, Any]
    """Final state by name: each weight, moment, step count, learning rate and random state."""


def rows_dataset(num_samples: int = NUM_SAMPLES, vocab_size: int = VOCAB_SIZE) -> Any:
    """Distinguishable rows: arithmetic sequences with different starts and strides."""
    import torch

    index = torch.arange(num_samples)[:, None]
    ids = (index + (1 + index % 7) * torch.arange(SEQ_LENGTH)) % vocab_size
    return [{"input_ids": row} for row in ids]


def shuffled_loader(dp: int) -> Any:
    """Plain ``DataLoader`` with ``shuffle=True``."""
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(), batch_size=GLOBAL_BATCH // dp, shuffle=True)


def make_module(run: Run, module_class: Any = None) -> Any:
    from lightning_megatron.engine.optimizer_options import OptimizerOptions
    from lightning_megatron.module import MegatronModule

    options = {
        "model": run.model if "model_type" in run.model else {**GPT2, **run.model},
        "lr": 1e-2,
        "optimizer": OptimizerOptions(**run.optimizer),
    }
    return (module_class or MegatronModule)(**{**options, **run.module})


def make_trainer(run: Run, *callbacks: Any) -> Any:
    import os

    import lightning.pytorch as pl

    from lightning_megatron.precision import MegatronPrecision
    from lightning_megatron.strategy import MegatronStrategy

    settings = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        **models.QUIET,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        "gradient_clip_val": 1.0,
        **run.trainer,
    }
    if settings.get("precision") == "16-mixed":  # Lightning would turn it into bf16-mixed on a CPU
        settings |= {"precision": None, "plugins": [MegatronPrecision("16-mixed")]}
    strategy = MegatronStrategy(**{"num_microbatches": 2, **run.strategy})
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **settings)


def fit(
    run: Run,
    *callbacks: Any,
    module_class: Any = None,
) -> tuple[Any, Trace]:
    """Train; return the Trainer, which can then save a checkpoint, and the trace."""
    import lightning.pytorch as pl

    pl.seed_everything(run.seed, verbose=False)
    steps: dict[int, dict[str, Any]] = {}

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        groups = trainer.optimizers[0].param_groups
        steps[trainer.global_step] = {
            "loss": float(outputs["loss"]),
            "lr": [group["lr"] for group in groups],
            "weight_decay": [group["weight_decay"] for group in groups],
            "grad_norm": trainer.strategy.optimizer_report.grad_norm,
            "tokens": next(iter(batch.values())).tolist(),
        }

    trainer = make_trainer(run, callback(on_train_batch_end=record), *callbacks)
    module = make_module(run, module_class)
    trainer.fit(module, ckpt_path=run.ckpt_path, **_data(run, trainer))
    return trainer, Trace(steps=steps, state=live_state(trainer))


def train(run: Run, save_as: Path | None = None) -> Trace:
    trainer, trace = fit(run)
    if save_as is not None:
        trainer.save_checkpoint(save_as)
    return trace


def train_with_checkpoints(
    run: Run, folder: Path, options: Mapping[str, Any] | None = None
) -> Trace:
    """Train with a stock ``ModelCheckpoint`` that keeps every checkpoint unless ``options`` change that."""
    return fit(run, checkpoints_at(folder, **(options or {})))[1]


def _data(run: Run, trainer: Any) -> dict[str, Any]:
    from torch.utils.data import DataLoader

    import lightning_megatron

    dp = trainer.strategy.data_parallel_size
    rows = run.global_batch // dp
    if run.indexed is None:
        validation = DataLoader(rows_dataset(12), batch_size=rows) if run.validate else None
        return {
            "train_dataloaders": (run.loader or shuffled_loader)(dp),
            "val_dataloaders": validation,
        }
    settings: dict[str, Any] = {"micro_batch_size": rows // trainer.strategy.num_microbatches}
    if run.data_module == "IndexedDataModule":
        settings["seq_length"] = SEQ_LENGTH
    if isinstance(run.indexed, str):
        settings |= {"data_path": run.indexed, "split": "1,0,0"}
    else:
        settings |= run.indexed
    return {"datamodule": getattr(lightning_megatron, run.data_module)(**settings)}


def callback(**hooks: Callable[..., Any]) -> Any:
    """Lightning callback with the given hooks, which are called without ``self``."""
    import lightning.pytorch as pl

    methods = {name: staticmethod(hook) for name, hook in hooks.items()}
    return type("Hooks", (pl.Callback,), methods)()


def live_state(trainer: Any) -> dict[str, Any]:
    """Weights, optimizer and random states of this rank by flat name."""
    strategy = trainer.strategy
    optimizer = trainer.optimizers[0]
    flat: dict[str, Any] = {}
    for index, chunk in enumerate(strategy.lightning_module.model_chunks):
        for name, parameter in chunk.named_parameters():
            flat[f"weights.{index}.{name}"] = parameter.detach().clone()
        for name, buffer in chunk.named_buffers():
            flat[f"buffers.{index}.{name}"] = buffer.clone()
    for index, part in enumerate(optimizer.parts):
        _flatten(f"optimizer.{index}", part.optimizer.state_dict(), flat)
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            _flatten(f"masters.{index}.{name}", getattr(part, name, None) or [], flat)
    _flatten("rng", strategy._runtime.state_dict(), flat)
    flat["global_step"] = trainer.global_step
    return flat


def _flatten(
    prefix: str,
    value: Any,
    into: dict[str, Any],
) -> None:
    import torch

    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{prefix}.{key}", item, into)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(f"{prefix}.{index}", item, into)
    elif isinstance(value, torch.Tensor):
        into[prefix] = value.detach().clone()
    else:
        into[prefix] = value


def differences(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
) -> list[str]:
    """Names whose values are not bitwise equal."""
    import torch

    names = [*(expected.keys() ^ found.keys())]
    for name in expected.keys() & found.keys():
        a = expected[name]
        b = found[name]
        both_tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if not (torch.equal(a, b) if both_tensors else a == b):
            names.append(name)
    return sorted(names)


def assert_exact_resume(
    uninterrupted: list[Trace], resumed: list[Trace], *first_steps: int
) -> None:
    """Check on every rank that a resume began at one of ``first_steps`` and took the steps of the uninterrupted run."""
    for rank, (expected, found) in enumerate(zip(uninterrupted, resumed, strict=True)):
        first = min(found.steps)
        assert first in first_steps
        assert found.steps == {
            step: values for step, values in expected.steps.items() if step >= first
        }
        assert differences(expected.state, found.state) == [], f"rank {rank} ended in another state"


def read_tensors(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, unsharded, by torch's own reader, without our code or Megatron's."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def read_plain_state(path: Path) -> dict[str, Any]:
    """Parameter groups and loss scale of a checkpoint's optimizer by flat name."""
    import torch

    flat: dict[str, Any] = {}
    common = torch.load(path / "common.pt", weights_only=True)
    _flatten("", common["optimizer"], flat)
    return flat


def make_corpus(folder: Path) -> str:
    """Prefix of an indexed dataset of 112 samples: eight steps are less than one epoch."""
    from tests.unit.data.corpus import build

    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, VOCAB_SIZE, size=60).tolist()] for _ in range(30)]
    return build(folder / "corpus", documents)


def names_in(folder: Path) -> list[str]:
    """Sorted names of the files and directories in ``folder``."""
    return sorted(path.name for path in folder.iterdir())


def checkpoints_at(folder: Path | str, **options: Any) -> Any:
    """Stock ``ModelCheckpoint`` that keeps every checkpoint, named by step."""
    import lightning.pytorch as pl

    settings = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": 1, **options}
    return pl.callbacks.ModelCheckpoint(folder, **settings)


# ---- saves by the engine, without Lightning -------------------------------------------------------------------------


@contextlib.contextmanager
def engine_run() -> Iterator[Any]:
    """``RunState`` after one step of plain data parallelism over all ranks, inside the engine."""
    run = Run(
        strategy={"num_microbatches": 1},
        trainer={"max_steps": 1},
        model={"n_layer": 2},
    )
    trainer, _ = fit(run)
    with trainer.strategy.engine():
        yield trainer.strategy._run_state()


def change(state: Any) -> None:
    """Change weights, masters and moments in place, in the same way in every process."""
    import torch

    with torch.no_grad():
        for chunk in state.chunks:
            for parameter in chunk.parameters():
                parameter.add_(1.0)
        for part in state.optimizer.parts:
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    master.add_(0.5)
                    for moment in part.optimizer.state.get(master, {}).values():
                        moment.add_(0.25)
    torch.rand(3)


def save(
    state: Any,
    content: dict[str, Any],
    path: Path,
) -> None:
    """Write a checkpoint of ``state`` with ``content`` in place of Lightning's dict."""
    begin_save(state, content, path, in_place=True).finish()


def begin_save(
    state: Any,
    content: dict[str, Any],
    path: Path,
    *,
    in_place: bool = False,
) -> Any:
    """Begin to write a checkpoint asynchronously; return the ``Save``."""
    from lightning_megatron.checkpoint.host_buffer import HostBuffer
    from lightning_megatron.checkpoint.save import Save

    saving = Save(state, {**content, "optimizer_states": []}, path)
    saving.start(HostBuffer(in_place=in_place))
    return saving
