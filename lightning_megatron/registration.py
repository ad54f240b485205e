"""Side effects of importing the package: strategy names, former homes of public names, filters for known warnings.

Lightning looks up strategy names in a registry that it fills on import; it has no entry points. If Lightning is already
imported, the names are registered at once. Otherwise an import hook registers them after Lightning's import, and then
removes itself. Saved configurations and checkpoints name classes by the modules that defined them, so modules that
public names have left still serve them. Filtered are warnings that libraries repeat on every rank of every run, and
that users cannot act upon.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megatron.strategy import MegatronStrategy

# ---- names of strategies ---------------------------------------------------------------------------------------------

_REGISTRY_MODULE = "lightning.pytorch.strategies"
STRATEGY_SIZES = (1, 2, 4, 8)
"""Sizes of tp and pp with registered names; any other layout needs ``MegatronStrategy(tp=..., pp=...)``."""


def strategy_names() -> dict[str, dict[str, int]]:
    """Layout of each strategy name: ``megatron``, ``megatron_tp2``, ``megatron_pp2``, ``megatron_tp2_pp2``, ..."""
    names = {"megatron": {"tp": 1, "pp": 1}}
    for size in STRATEGY_SIZES:
        names |= {
            f"megatron_tp{size}": {"tp": size, "pp": 1},
            f"megatron_pp{size}": {"tp": 1, "pp": size},
        }
    return names | {
        f"megatron_tp{tp}_pp{pp}": {"tp": tp, "pp": pp}
        for tp in STRATEGY_SIZES
        for pp in STRATEGY_SIZES
    }


def register_strategies() -> None:
    """Register the strategy names with Lightning, now or as soon as it is imported."""
    if _REGISTRY_MODULE in sys.modules:
        _register_in(sys.modules[_REGISTRY_MODULE])
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())


def _register_in(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name, layout in strategy_names().items():
        if name not in registry:  # this package may have been reloaded
            description = (
                "Megatron-Core with tensor parallel size {tp} and pipeline parallel size {pp}"
            ).format(**layout)
            registry.register(name, _build, description=description, **layout)


def _build(tp: int, pp: int) -> MegatronStrategy:
    """Build a strategy; registered in place of the class, so that the engine is imported only when used."""
    from lightning_megatron.strategy import MegatronStrategy

    return MegatronStrategy(tp=tp, pp=pp)


class _RegisterAfterImport(MetaPathFinder):
    """Import hook that registers the strategy names right after the import of Lightning's registry."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find the registry with the other finders, and extend its loader; None for any other module."""
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        _extend(spec.loader, _register_in)
        return spec


def _extend(loader: Loader, then: Callable[[ModuleType], None]) -> None:
    """Have a loader call ``then`` with the module that it has executed.

    The loader stays the same, because inspect and importlib.resources get sources and files from it.
    """
    execute = loader.exec_module

    def execute_and_go_on(module: ModuleType) -> None:
        execute(module)
        then(module)

    loader.exec_module = execute_and_go_on  # type: ignore[method-assign]


# ---- former homes of public names -----------------------------------------------------------------------------------

FORMER_HOMES: dict[str, tuple[str, ...]] = {
    "lightning_megatron.callbacks": (
        "LossCurve",
        "PerplexityReport",
        "ProgressLine",
        "SampleText",
        "ThroughputMonitor",
    ),
    "lightning_megatron.checkpoint.load": ("LoadFrom",),
    "lightning_megatron.convert.peft": ("LoRA",),
    "lightning_megatron.data.masked": ("MaskingOptions",),
    "lightning_megatron.datamodules": (
        "DatasetDataModule",
        "IndexedDataModule",
        "InstructionDataModule",
        "TextEvaluationDataModule",
    ),
    "lightning_megatron.engine.collectives": (
        "avg_losses_across_data_parallel_group",
        "gather_across_data_parallel_groups",
    ),
    "lightning_megatron.engine.heartbeat": ("Heartbeat",),
    "lightning_megatron.engine.lr_schedule": ("LRSchedule",),
    "lightning_megatron.engine.optimizer": ("OptimizerOptions",),
    "lightning_megatron.engine.schedule": ("TrainStep",),
    "lightning_megatron.errors": ("CheckpointError", "ConfigError", "DataError"),
    "lightning_megatron.generate.options": ("GenerationOptions",),
    "lightning_megatron.guards": ("ReplicaCheck", "SpikeGuard"),
    "lightning_megatron.megatron_datamodule": ("MegatronDataModule",),
    "lightning_megatron.module": ("MegatronModule",),
    "lightning_megatron.precision": ("MegatronPrecision",),
    "lightning_megatron.predictions": ("gather_predictions",),
    "lightning_megatron.steps.bert": ("BertTrainStep",),
    "lightning_megatron.steps.gpt": ("GPTTrainStep", "LastWordTrainStep"),
    "lightning_megatron.steps.t5": ("T5TrainStep",),
    "lightning_megatron.strategy": ("MegatronStrategy",),
}
"""Modules that have defined public names, whether or not they still do. Only new entries are ever needed: the present
homes are in ``__init__.pyi``."""


def serve_former_homes(homes: Mapping[str, str]) -> None:
    """Let ``lightning_megatron.callbacks.spike_guard.SpikeGuard`` and other former paths lead to the present class.

    Args:
        homes: Public name to the module that defines it.
    """
    if not any(isinstance(finder, _FormerHomes) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerHomes(homes))


class _FormerHomes(MetaPathFinder):
    """Finds the modules of ``FORMER_HOMES``, also those that are gone, and adds the names that have left them."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find a former home with the other finders, or make an empty module; None for any other module."""
        if fullname not in FORMER_HOMES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None) or ModuleSpec(fullname, _EmptyModule())
        assert spec.loader is not None
        _extend(spec.loader, self._serve)
        return spec

    def _serve(self, module: ModuleType) -> None:
        vars(module).setdefault("__getattr__", partial(self._get, module.__name__))

    def _get(self, module: str, name: str) -> Any:
        """A public name that has moved from ``module``."""
        home = self._homes.get(name, module)
        if home == module or name not in FORMER_HOMES[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)


class _EmptyModule(Loader):
    """Loader of a module that is gone."""

    def exec_module(self, module: ModuleType) -> None:
        """Define nothing."""


# ---- warnings --------------------------------------------------------------------------------------------------------

_IGNORED_WARNINGS = (
    # (message, module), regular expressions that match from the start, and why they are ignored.
    # Fallbacks of the engine: the start-up lines name what is used instead. Warnings of its config checks are about
    # transformer_config_overrides, and are kept.
    ("", r"megatron\.(?!core\.(transformer\.transformer_config|model_parallel_config)$)"),
    # Megatron uses names that torch 2.13 deprecates.
    (r"`torch\.distributed\.\w+` is deprecated", ""),
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", ""),  # Lightning does, too
    ("Please use DTensor instead", ""),  # ShardedTensor, used by Megatron's checkpoints
    # sync_dist: losses are already equal on all ranks.
    (r"It is recommended to use `self\.log\(", ""),
    # A data module without this split, by its options.
    (r"Total length of `list` across ranks is zero", ""),
    # Other ranks return None, and generated text may be streamed.
    (r"predict returned None if it was on purpose", ""),
)
_IGNORED_RECORDS = {
    "lightning.pytorch.utilities.rank_zero": re.compile(
        "💡 Tip: For seamless cloud|"
        "The following callbacks returned in .* Trainer: ((Whole)?(Rich)?ModelSummary(, )?)+$"
    ),
    "megatron.core.distributed.distributed_data_parallel": re.compile(
        "DistributedDataParallel: full_param_layout not provided"
    ),
    "megatron.core.tensor_parallel.random": re.compile(
        "CPU RNG state changed within GPU RNG context"
    ),
    "megatron.core.transformer.transformer_layer": re.compile("Rewrapping ModuleSpec with module"),
}
"""Ignored log records by logger. Lightning 2.6.6 recommends litlogger and litmodels at each start, and reports that its
summary of this rank's shard is replaced by ours of the whole model. Megatron on a CPU: both RNG states are of one
generator. Megatron 0.18 and later: DDP computes the layout of its buffers itself, as in 0.16; and for each layer, the
MLP is specified in the form that 0.16 requires."""
_RECORDS_OF_ONE_RANK = {
    "transformers.configuration_utils": re.compile("Model config: "),
}
"""Log records by logger that all ranks would write, and rank 0 alone does. transformers 5: each special token that is
not in the vocabulary, such as the default bos and eos of GPT-2 for a smaller one."""


def hide_known_warnings() -> None:
    """Filter known warnings and log records; the user's own filters and ``python -W`` take precedence."""
    for message, module in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=module, append=True)
    for name in _IGNORED_RECORDS:
        logging.getLogger(name).addFilter(_is_not_ignored)
    for name in _RECORDS_OF_ONE_RANK:
        logging.getLogger(name).addFilter(_is_of_rank_zero)


def _is_not_ignored(record: logging.LogRecord) -> bool:
    return _IGNORED_RECORDS[record.name].match(str(record.msg)) is None


def _is_of_rank_zero(record: logging.LogRecord) -> bool:
    if _RECORDS_OF_ONE_RANK[record.name].match(str(record.msg)) is None:
        return True
    from lightning_utilities.core.rank_zero import (
        rank_zero_only,  # importing the package is fast without
    )

    return getattr(rank_zero_only, "rank", 0) == 0  # Lightning sets it from the environment
