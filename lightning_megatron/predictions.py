"""Predictions of all data-parallel copies of the model, gathered in the order of the dataset."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.data.loader import PADDING_ROW, EvaluationLoader, PassLoader
from lightning_megatron.engine.collectives import call_on_all_ranks, data_parallel_group
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.strategy import MegatronStrategy


def gather_predictions(trainer: pl.Trainer, predictions: Sequence[Any] | None) -> list[Any]:
    """One prediction for each sample of the dataset, in its order, on every rank; every rank must call.

    ``Trainer.predict`` gives each copy of the model what it predicted of its own samples, batch by batch::

        predictions = trainer.predict(module, loader)
        texts_or_logits = gather_predictions(trainer, predictions)  # texts_or_logits[7] belongs to dataset[7]

    Any number of samples and copies, several lengths of rows and a smaller last batch are all right (of an ordinary
    DataLoader Lightning wants at least one sample for each copy). Each rank holds the predictions of all copies
    afterwards: for what does not fit into memory write each batch in a ``BasePredictionWriter``, and call
    ``trainer.predict(return_predictions=False)``.

    Args:
        trainer: The one that predicted, with a map-style DataLoader or a ``MegatronDataModule``.
        predictions: What its ``predict`` returned here: for each batch a tensor [rows, ...], or a dict, tuple or list
            of some. With several loaders, a list of these for each.

    Returns:
        A list with an entry for each sample that was predicted: of a tensor [rows, ...] one row [...], on the CPU; of a
        dict a dict of such. None where the batches were None, as those of earlier pipeline stages are with
        ``return_logits="last_stage"``. With several loaders a list of lists.

    Raises:
        ConfigError: Before the process groups exist; if there are no predictions, nobody knows which samples the
            batches were of, or a prediction has other rows than its batch; on all ranks, if a sample was predicted
            twice.
    """
    if trainer.predict_dataloaders is None:
        raise ConfigError("this Trainer has predicted nothing yet; call its predict first")
    if predictions is None:
        raise ConfigError("predictions=None: expected those of Trainer.predict(return_predictions=True)")
    strategy: Any = trainer.strategy
    loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
    if len(loaders) > 1:
        return [_gathered(loader, part, strategy) for loader, part in zip(loaders, predictions, strict=True)]
    return _gathered(loaders[0], predictions, strategy)


def _gathered(loader: Any, predictions: Sequence[Any], strategy: MegatronStrategy) -> list[Any]:
    if not isinstance(loader, (EvaluationLoader, PassLoader)):
        raise ConfigError(f"a {type(loader).__name__} does not tell its samples; use one over a map-style dataset")
    # As the rank knows them that has read them: the loaders of others may have shuffled otherwise, unused.
    dealt = [list(loader.batch_indices())]
    topology = strategy.topology
    dist.broadcast_object_list(dealt, topology.mp_source, group=topology.mp_header_group)

    def checked() -> list[tuple[Any, list[_Sample | None]]]:
        pairs = zip(predictions, dealt[0], strict=False)
        return [_with_samples(loader, prediction, samples) for prediction, samples in pairs]

    own, group = call_on_all_ranks(checked), data_parallel_group()
    of_copies: list[Any] = [own] * dist.get_world_size(group)
    if len(of_copies) > 1:
        dist.all_gather_object(of_copies, own, group=group)
    found: dict[_Sample, Any] = {}
    for prediction, samples in chain.from_iterable(of_copies):
        for row, sample in enumerate(samples):
            if sample in found:
                raise ConfigError(f"sample {sample[0]} was predicted twice; give predict a loader with shuffle=False")
            if sample is not None:
                found[sample] = pytree.tree_map(lambda leaf, row=row: None if leaf is None else leaf[row], prediction)
    return [found[sample] for sample in sorted(found)]


_Sample: TypeAlias = tuple[int, int]
"""Number in the dataset; and, where an item of the dataset is a whole batch, number in that."""


def _with_samples(
    loader: EvaluationLoader | PassLoader, prediction: Any, dealt: Sequence[int]
) -> tuple[Any, list[_Sample | None]]:
    """A batch's prediction on the host, and the sample of each row; None for rows that fill the batch up, if there."""
    leaves, structure = pytree.tree_flatten(prediction)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise ConfigError(f"a {type(leaf).__name__} cannot be gathered; return tensors, or lists or dicts of them")
    # A view would travel with all that it is a view of.
    leaves = [None if leaf is None else leaf.detach().cpu().clone() for leaf in leaves]
    lengths = {len(leaf) if leaf.dim() else -1 for leaf in leaves if leaf is not None}
    real = [sample for sample in dealt if sample != PADDING_ROW]
    samples: list[_Sample | None]
    if isinstance(loader, EvaluationLoader) and loader.loader.batch_sampler is None and real:
        samples = [(real[0], row) for row in range(max(lengths, default=1))]
    elif lengths <= {len(real)}:
        samples = [(sample, 0) for sample in real]
    elif lengths == {len(dealt)}:
        samples = [None if sample == PADDING_ROW else (sample, 0) for sample in dealt]
    else:
        raise ConfigError(
            f"a prediction has {sorted(lengths)} rows, and its batch has {len(real)} samples; return one each"
        )
    return pytree.tree_unflatten(leaves, structure), samples


# ---- a sample for each copy ------------------------------------------------------------------------------------------


def check_predict_size(loader: object) -> None:
    """Refuse a loader of ``Trainer.predict`` on the ranks that have a sample of it, when others have none.

    Raises:
        ConfigError: If the copies of the model are more than its samples (or batches, where a sample is a whole one).
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if isinstance(sampler, UnrepeatedDistributedSampler) and 0 < sampler.total_size < sampler.num_replicas:
        raise ConfigError(_TOO_FEW)


def told_predict_size(error: AssertionError) -> ConfigError | None:
    """The same error on the ranks that have no sample, where Lightning's sampler fails while it is made.

    lightning 2.6.6, overrides/distributed.py:UnrepeatedDistributedSampler asserts it without words, before a hook sees
    the loader. None for any other error.
    """
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return ConfigError(_TOO_FEW) if file == inspect.getfile(UnrepeatedDistributedSampler) else None


_TOO_FEW = (
    "predict has fewer samples than there are copies of the model (dp), and each needs at least one; use fewer devices "
    "or a larger tp or pp, or serve the samples with DatasetDataModule(test=...), which takes any number"
)
