"""``gather_predictions``: predictions of all data-parallel replicas, in dataset order."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch.distributed as dist
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.data.evaluation_loader import EvaluationLoader
from lightning_megatron.data.loader import PADDING_ROW, PassLoader
from lightning_megatron.engine.collectives import call_on_all_ranks, data_parallel_group
from lightning_megatron.errors import ConfigError, type_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.engine.groups import Topology


class _HasTopology(Protocol):
    """A strategy with Megatron's process groups."""

    @property
    def topology(self) -> Topology: ...


def gather_predictions(trainer: pl.Trainer, predictions: Sequence[Any] | None) -> list[Any]:
    """All-gather what ``Trainer.predict`` returned: one prediction per sample, in dataset order, on every rank.

    Collective over the world. ``Trainer.predict`` returns, on each data-parallel replica, the predictions of that
    replica's samples, batch by batch::

        predictions = trainer.predict(module, loader)
        texts_or_logits = gather_predictions(trainer, predictions)  # texts_or_logits[7] belongs to dataset[7]

    Any number of samples and replicas, rows of different lengths and a smaller last batch are supported (with an
    ordinary DataLoader Lightning requires at least one sample per replica). Each rank then holds the predictions of all
    replicas: if these do not fit into memory, write each batch in a ``BasePredictionWriter``, and call
    ``trainer.predict(return_predictions=False)``.

    Args:
        trainer: The Trainer that predicted, with a map-style DataLoader or a ``MegatronDataModule``.
        predictions: What ``trainer.predict`` returned on this rank: for each batch a tensor [rows, ...], or a dict,
            tuple or list of tensors. With several loaders, one such list per loader.

    Returns:
        A list with one entry per predicted sample: a row [...] of a tensor [rows, ...], on the CPU; a dict of rows of a
        dict. None where the batches were None, as on earlier pipeline stages with ``return_logits="last_stage"``. With
        several loaders a list of lists.

    Raises:
        ConfigError: Before the process groups exist; if there are no predictions, the loader does not tell the samples
            of its batches, or a prediction has another number of rows than its batch; on all ranks, if a sample was
            predicted twice.
    """
    if trainer.predict_dataloaders is None:
        raise ConfigError("this Trainer has predicted nothing yet; call trainer.predict first")
    if predictions is None:
        raise ConfigError(
            "predictions=None: expected the result of Trainer.predict(return_predictions=True)"
        )
    strategy: Any = trainer.strategy
    loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
    if len(loaders) > 1:
        return [
            _gather(loader, part, strategy)
            for loader, part in zip(loaders, predictions, strict=True)
        ]
    return _gather(loaders[0], predictions, strategy)


def _gather(
    loader: Any,
    predictions: Sequence[Any],
    strategy: _HasTopology,
) -> list[Any]:
    """All-gather the predictions of one loader, in dataset order. Collective over the world."""
    if not isinstance(loader, (EvaluationLoader, PassLoader)):
        raise ConfigError(
            f"{type_of(loader)} does not tell its samples; use one over a map-style dataset"
        )
    # From the rank that read the batches: the other ranks' loaders were not used, and may have shuffled differently.
    indices = [list(loader.batch_indices())]
    topology = strategy.topology
    dist.broadcast_object_list(indices, topology.mp_source, group=topology.mp_header_group)

    def match_batches() -> list[tuple[Any, list[_Sample | None]]]:
        pairs = zip(predictions, indices[0], strict=False)
        return [_match_samples(loader, prediction, batch) for prediction, batch in pairs]

    own = call_on_all_ranks(match_batches)
    group = data_parallel_group()
    replicas: list[Any] = [own] * dist.get_world_size(group)
    if len(replicas) > 1:
        dist.all_gather_object(replicas, own, group=group)
    rows: dict[_Sample, Any] = {}
    for prediction, samples in chain.from_iterable(replicas):
        for row, sample in enumerate(samples):
            if sample in rows:
                raise ConfigError(
                    f"sample {sample[0]} was predicted twice; give predict a loader with shuffle=False, and "
                    "leave use_distributed_sampler=False out"
                )
            if sample is not None:
                rows[sample] = pytree.tree_map(partial(_row_of, row), prediction)
    return [rows[sample] for sample in sorted(rows)]


def _row_of(row: int, leaf: Tensor | None) -> Tensor | None:
    return None if leaf is None else leaf[row]


_Sample: TypeAlias = tuple[int, int]
"""Index in the dataset, and row within the dataset item where an item is a whole batch (else 0)."""


def _match_samples(
    loader: EvaluationLoader | PassLoader, prediction: Any, indices: Sequence[int]
) -> tuple[Any, list[_Sample | None]]:
    """Copy a batch's prediction to the CPU, and find the sample of each row; None for padding rows among them."""
    lengths: set[int] = set()

    def copy(leaf: Any) -> Tensor | None:
        if leaf is None:
            return None
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"{type_of(leaf)} cannot be gathered; return tensors, or lists or dicts of them"
            )
        lengths.add(len(leaf) if leaf.dim() else -1)
        return leaf.detach().cpu().clone()  # pickling a view would send its whole storage

    copied = pytree.tree_map(copy, prediction)
    real = [index for index in indices if index != PADDING_ROW]
    samples: list[_Sample | None]
    if isinstance(loader, EvaluationLoader) and loader.loader.batch_sampler is None and real:
        num_rows = max(lengths, default=1)
        samples = [(real[0], row) for row in range(num_rows)]
    elif lengths <= {len(real)}:
        samples = [(index, 0) for index in real]
    elif lengths == {len(indices)}:
        samples = [None if index == PADDING_ROW else (index, 0) for index in indices]
    else:
        raise ConfigError(
            f"a prediction has {sorted(lengths)} rows, and its batch has {len(real)} samples; return one row per sample"
        )
    return copied, samples


# ---- at least one sample per replica ---------------------------------------------------------------------------------


def check_predict_size(loader: object) -> None:
    """Refuse, on the ranks that have samples, a loader of ``Trainer.predict`` of which other ranks have none.

    Raises:
        ConfigError: If there are fewer samples than data-parallel replicas (batches, if an item is a whole batch).
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        batches = loader
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, UnrepeatedDistributedSampler):
        return
    if 0 < sampler.total_size < sampler.num_replicas:
        raise ConfigError(_TOO_FEW_SAMPLES)


def predict_size_error(error: AssertionError) -> ConfigError | None:
    """The error of ``check_predict_size`` on ranks without samples, where constructing Lightning's sampler fails.

    lightning 2.6.6, overrides/distributed.py:UnrepeatedDistributedSampler asserts without a message, before any hook
    sees the loader. None for any other error.
    """
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    if file != inspect.getfile(UnrepeatedDistributedSampler):
        return None
    return ConfigError(_TOO_FEW_SAMPLES)


_TOO_FEW_SAMPLES = (
    "predict has fewer samples than data-parallel replicas (dp), and each needs at least one; use fewer devices or a "
    "larger tp or pp, or serve the samples with DatasetDataModule(test=...), which takes any number"
)
