"""What did all copies of the model predict together, sample by sample, in the order of the dataset?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_megatron.data.broadcast import describe, pack, unpack
from lightning_megatron.data.loader import PADDING_ROW, EvaluationLoader, PassLoader
from lightning_megatron.engine.collectives import data_parallel_group, gather_across_data_parallel_groups
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
    loaders = _loaders(trainer)
    if predictions is None:
        raise ConfigError(
            "predictions=None: predict was called with return_predictions=False, or had no batch; leave that out, and "
            "give it at least one sample"
        )
    strategy: Any = trainer.strategy
    if len(loaders) > 1:
        return [_gathered(loader, part, strategy) for loader, part in zip(loaders, predictions, strict=True)]
    return _gathered(loaders[0], predictions, strategy)


def _loaders(trainer: pl.Trainer) -> list[Any]:
    loaders = trainer.predict_dataloaders
    if loaders is None:
        raise ConfigError("this Trainer has predicted nothing yet; call its predict first")
    return list(CombinedLoader(loaders, "sequential").flattened)


def _gathered(loader: Any, predictions: Sequence[Any], strategy: MegatronStrategy) -> list[Any]:
    if not isinstance(loader, (EvaluationLoader, PassLoader)):
        raise ConfigError(
            f"a {type(loader).__name__} does not tell which samples its batches are of; use a DataLoader over a "
            "map-style dataset, or gather rows that say it themselves with gather_across_data_parallel_groups"
        )
    found: dict[_Sample, Any] = {}
    for batches, tensors in _of_all_ranks(loader, predictions, strategy):
        for batch in batches:
            for row, sample in enumerate(batch.samples):
                if sample in found:
                    raise ConfigError(
                        f"sample {sample[0]} was predicted twice: each copy of the model shuffles on its own, or the "
                        "sampler repeats it; give predict a DataLoader with shuffle=False"
                    )
                if sample is not None:
                    found[sample] = _row_of(batch.structure, tensors, row)
    return [found[sample] for sample in sorted(found)]


def _of_all_ranks(
    loader: EvaluationLoader | PassLoader, predictions: Sequence[Any], strategy: MegatronStrategy
) -> list[tuple[list[_Batch], dict[str, Tensor]]]:
    """The batches of each data-parallel rank, and the tensors in them."""
    group = data_parallel_group()
    tensors: dict[str, Tensor] = {}
    batches: list[_Batch] = []
    failure: ConfigError | None = None
    dealt = _dealt_to_copy(loader, strategy)
    try:
        for number, (prediction, samples) in enumerate(zip(predictions, dealt, strict=False)):
            structure = _taken_apart(prediction, str(number), tensors)
            batches.append(_Batch(structure=structure, samples=_samples_of_rows(loader, structure, tensors, samples)))
    except ConfigError as error:
        failure = error  # for all ranks, none of which may be left waiting
    if dist.get_world_size(group) == 1 and failure is None:
        return [(batches, tensors)]
    buffer = pack(tensors) if tensors else torch.empty(0, dtype=torch.uint8)
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (failure, batches, describe(tensors), len(buffer)), group=group)
    for of_rank, *_ in answers:
        if of_rank is not None:
            raise of_rank
    parts = gather_across_data_parallel_groups(buffer).split([size for *_, size in answers])
    # A tensor of its own begins where any dtype may begin.
    contents = [unpack(part.clone(), header) for (*_, header, _), part in zip(answers, parts, strict=True)]
    return [(of_rank, tensors) for (_, of_rank, *_), tensors in zip(answers, contents, strict=True)]


def _dealt_to_copy(loader: EvaluationLoader | PassLoader, strategy: MegatronStrategy) -> list[list[int]]:
    """Samples of each batch of this copy of the model, as the rank knows them that has read it.

    The loaders of its other ranks may have shuffled otherwise; what those yielded was not used.
    """
    dealt = [list(loader.samples_of_batches())]
    topology = strategy.topology
    dist.broadcast_object_list(dealt, topology.mp_source, group=topology.mp_header_group)
    return dealt[0]


_Sample: TypeAlias = tuple[int, int]
"""Number in the dataset; and, where an item of the dataset is a whole batch, number in that."""


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """Stands for a tensor that travels apart."""

    name: str


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What was predicted of one batch."""

    structure: Any
    """Lists, tuples and dicts of ``_Leaf``; None if nothing was predicted here."""
    samples: list[_Sample | None]
    """Of each row; None for rows that fill the batch up."""


def _each_leaf(structure: Any, change: Callable[[_Leaf], Any]) -> Any:
    if isinstance(structure, _Leaf):
        return change(structure)
    if isinstance(structure, dict):
        return {key: _each_leaf(part, change) for key, part in structure.items()}
    return None if structure is None else type(structure)(_each_leaf(part, change) for part in structure)


def _row_of(structure: Any, tensors: Mapping[str, Tensor], row: int) -> Any:
    return _each_leaf(structure, lambda leaf: tensors[leaf.name][row])


def _taken_apart(prediction: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The structure of a batch's prediction; its tensors are added to ``tensors``."""
    if prediction is None:
        return None
    if isinstance(prediction, Tensor):
        tensors[name] = prediction.detach().cpu()
        return _Leaf(name=name)
    if isinstance(prediction, Mapping):
        return {key: _taken_apart(part, f"{name}.{key}", tensors) for key, part in prediction.items()}
    if isinstance(prediction, (list, tuple)):
        parts = [_taken_apart(part, f"{name}.{number}", tensors) for number, part in enumerate(prediction)]
        return parts if isinstance(prediction, list) else tuple(parts)
    raise ConfigError(
        f"a {type(prediction).__name__} cannot be gathered; let predict_step return tensors, or lists and dicts of "
        "tensors"
    )


def _samples_of_rows(
    loader: EvaluationLoader | PassLoader, structure: Any, tensors: Mapping[str, Tensor], dealt: Sequence[int]
) -> list[_Sample | None]:
    """Which sample each row of a batch's prediction is of, whether or not rows that fill it up were left out."""
    lengths: set[int] = set()
    _each_leaf(structure, lambda leaf: lengths.add(len(tensors[leaf.name]) if tensors[leaf.name].dim() else -1))
    real = [sample for sample in dealt if sample != PADDING_ROW]
    if isinstance(loader, EvaluationLoader) and loader.loader.batch_sampler is None and real:
        return [(real[0], row) for row in range(max(lengths, default=1))]
    if lengths <= {len(real)}:
        return [(sample, 0) for sample in real]
    if lengths == {len(dealt)}:
        return [None if sample == PADDING_ROW else (sample, 0) for sample in dealt]
    raise ConfigError(
        f"a prediction has {sorted(lengths)} rows, and its batch has {len(real)} samples; let predict_step return one "
        "row for each, first axis first"
    )
