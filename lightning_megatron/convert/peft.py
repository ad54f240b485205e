"""LoRA options with ``peft``'s names, and loading and saving of ``peft`` adapters.

An adapter is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``. ``PeftModel.from_pretrained``
loads adapters saved here; adapters saved by ``peft`` are loaded if their config is one of plain LoRA.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.convert.registry import config_object, family_of, read_json, rules_of
from lightning_megatron.convert.rules import linear_rules
from lightning_megatron.convert.source import Description, ModelSource, Source
from lightning_megatron.convert.weight_files import WeightFiles, read_safetensors, write_weight_file
from lightning_megatron.convert.weight_gatherer import WeightGatherer
from lightning_megatron.convert.weight_loader import WeightLoader
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    as_options,
    require_kind,
    require_number,
)
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.adapter_names import is_trained_with_lora
from lightning_megatron.models.config import CLASSIFICATION, Adapters, ModelConfig
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.hub import local_folder, named_folder
from lightning_megatron.storage.publish import staged

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ALL_LINEARS = "all-linear"

_KNOWN_FIELDS = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
}
"""Fields of ``adapter_config.json`` that are read, or that do not affect what an adapter computes."""
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other ones change the base.
    "init_lora_weights": (
        True,
        False,
        "gaussian",
        "eva",
        "orthogonal",
    ),
}
"""Fields of which only some values are plain LoRA."""
_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
}
"""``peft``'s name of each task that it knows."""
_CLASSIFIERS = ("classifier", "score")
_HEADS = {
    "sequence_classification": _CLASSIFIERS,
    "token_classification": _CLASSIFIERS,
    "question_answering": ("qa_outputs",),
}
"""Modules that ``peft`` trains and saves in full, by task: those of them that the model has."""
_PREFIX = "base_model.model."
"""Of all names in ``peft``'s files."""


@checks_options
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train low-rank adapters beside frozen weights (Hu et al. 2021, arXiv 2106.09685), as ``peft`` does.

    A classification head is trained with them, in full, and saved beside them.

    Args:
        rank: Inner dimension of the two matrices of an adapter; ``peft``'s ``r``.
        alpha: The output of adapters is multiplied by alpha / rank; ``peft``'s ``lora_alpha``.
        dropout: Dropout probability on the input of adapters, with separate random masks for each adapter.
        targets: Linear layers to adapt, by their names in the Hugging Face model or suffixes of these: ``q_proj``,
            ``v_proj``, ``mlp.c_proj``; ``all-linear`` for all.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEARS  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ConfigError: If the rank is not a positive integer, another value is out of range, or there is no target.
        """
        require_kind("lora rank", self.rank, "int")
        require_number("lora rank", self.rank, at_least=1, at_most=2**16)
        require_number("lora alpha", self.alpha)
        require_number("lora dropout", self.dropout)
        if self.alpha == 0 or self.dropout >= 1:
            raise ConfigError(
                f"lora: expected alpha > 0 and dropout < 1, got alpha={self.alpha} and dropout={self.dropout}; "
                "correct them"
            )
        is_other_text = isinstance(self.targets, str) and self.targets != ALL_LINEARS
        if not self.targets or is_other_text:
            raise ConfigError(
                f"lora targets: expected names of modules as ['q_proj', 'v_proj'], or {ALL_LINEARS!r}, got "
                f"{self.targets!r}; correct targets"
            )
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Adapters that a module trains beside frozen weights."""

    lora: LoRA
    source: Path | None
    """Directory of the adapter to initialize training from; None for new adapters."""
    base: str | None
    """Name or directory of the base model, which weights-only checkpoints record instead of its frozen weights; None:
    they store the frozen weights."""

    def apply_to(self, model: ModelConfig, model_provider: object) -> ModelConfig:
        """Return ``model`` with the adapters.

        Raises:
            ConfigError: If the model has no such linear layers, or a ``model_provider`` builds it.
        """
        if model_provider is not None:
            raise ConfigError(
                "lora: expected this package's layers, got a model_provider; leave one of them out"
            )
        return with_adapters(model, self.lora)


def adaptation(
    lora: LoRA | Mapping[str, Any] | str | Path | None, base: str | None
) -> Adaptation | None:
    """Parse the ``lora`` option of a module.

    Args:
        lora: Options of new adapters, or the directory of an adapter.
        base: Name or directory of the base model; None if its weights are random or come from a checkpoint.

    Raises:
        ConfigError: If an option is invalid.
        CheckpointError: If the directory holds no adapter of plain LoRA.
    """
    if lora is None:
        return None
    if base is not None and Path(base).exists():
        base = str(Path(base).absolute())
    if isinstance(lora, (str, Path)):
        source = Path(lora)
        return Adaptation(
            lora=AdapterSource(source).lora(),
            source=source,
            base=base,
        )
    options = as_options(LoRA, lora, "lora")
    return Adaptation(lora=options, source=None, base=base)


def with_adapters(model: ModelConfig, lora: LoRA) -> ModelConfig:
    """Return ``model`` with adapters on the targets of ``lora``.

    Raises:
        ConfigError: If a target matches no linear layer.
    """
    rules = linear_rules(rules_of(model))
    linears = {name: rule.modules for name, rule in rules.items()}
    targets = [""] if lora.targets == ALL_LINEARS else list(lora.targets)
    modules = list(itertools.chain.from_iterable(linears.values()))
    for target in targets:
        if not any(_matches(module, target) for module in modules):
            suffixes = dict.fromkeys(module.rpartition(".")[2] for module in modules)
            names = ", ".join(suffixes)
            raise ConfigError(
                f"lora targets: expected linears of {model.family} layers, one of {names}, got {target!r}; correct it"
            )
    adapted = []
    for name, fused in linears.items():
        parts = tuple(any(_matches(module, target) for target in targets) for module in fused)
        if any(parts):
            adapted.append((name, parts))
    adapters = Adapters(
        rank=lora.rank,
        alpha=lora.alpha,
        linears=tuple(adapted),
    )
    return replace(model, lora=adapters, lora_dropout=lora.dropout)


def _matches(module: str, target: str) -> bool:
    """Whether ``target`` matches a module name as in ``peft``: in full or as a suffix; an empty target matches all."""
    return not target or module == target or module.endswith(f".{target}")


# ---- loading --------------------------------------------------------------------------------------------------------


class _AdapterFiles(WeightFiles):
    """Weights of an adapter; those of its head by their names in the model, without ``peft``'s prefix."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._stored_name: dict[str, str] = {}
        for name in files.tensors:
            own = name if ".lora_" in name else name.removeprefix(_PREFIX)
            self._stored_name[own] = name
        super().__init__({own: files.tensors[name] for own, name in self._stored_name.items()})

    @property
    def num_labels(self) -> int | None:
        """Rows of the head's matrix; None without a head."""
        for name, stored in self.tensors.items():
            if ".lora_" not in name and name.endswith(".weight") and len(stored.shape) == 2:
                return stored.shape[0]
        return None

    def read(
        self,
        name: str,
        box: tuple[slice, ...],
    ) -> Tensor:
        """See ``WeightFiles``."""
        return self._files.read(self._stored_name[name], box)


class AdapterSource(HuggingFaceSource):
    """Weights of a ``peft`` adapter, and of a classification head that was trained with it."""

    kind = "PEFT adapter"
    has_base_weights = False
    has_adapters = True

    def __init__(self, path: Path) -> None:
        """Read the config and the header of the weights; see ``Source``."""
        Source.__init__(self, path)
        if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
            raise CheckpointError(
                f"adapter {path}: expected a directory with {CONFIG} and {WEIGHTS}, got none; correct it"
            )
        self._config = read_json(path / CONFIG)
        files = WeightFiles(read_safetensors(path / WEIGHTS))
        adapter_files = _AdapterFiles(files)
        self._files = adapter_files
        self._num_labels = adapter_files.num_labels
        self.stored = files.tensors
        self.metadata = {"adapter": self._config}
        self.base = str(self._config.get("base_model_name_or_path"))

    def lora(self) -> LoRA:
        """Options of the adapter, with the modules of its weights as targets.

        Raises:
            CheckpointError: If the adapter is damaged or is not plain LoRA.
        """
        for name, value in self._config.items():
            if name == "modules_to_save":
                heads = {module for modules in _HEADS.values() for module in modules}
                is_plain = heads.issuperset(value or ())
                supported = f"only heads ({', '.join(sorted(heads))})"
            elif name in _EXPECTED:
                is_plain = value in _EXPECTED[name]
                supported = " or ".join(map(repr, _EXPECTED[name]))
            else:
                is_plain = not value or name in _KNOWN_FIELDS
                supported = "it unset"
            if not is_plain:
                raise CheckpointError(
                    f"adapter {self.path}: expected {supported} for {name}, got {value!r}, which changes what it "
                    "computes; use an adapter of plain LoRA"
                )
        targets: dict[str, None] = {}
        for name in self.stored:
            module = name.removeprefix("base_model.model.").rpartition(".lora_A.")[0]
            if module:
                targets[re.sub(r"^.*?\.\d+\.", "", module)] = None
        try:
            return LoRA(
                rank=self._config["r"],
                alpha=self._config["lora_alpha"],
                dropout=self._config["lora_dropout"],
                targets=tuple(targets),
            )
        except (KeyError, ConfigError) as error:
            raise CheckpointError(f"adapter {self.path} is damaged: {error}; use another") from None

    def describe(self, config: Path | None) -> Description:
        """See ``Source``; ``config`` is the config of the base model."""
        assert config is not None
        hf_config = config_object(config)
        of_types = {kind: task for task, kind in _TASKS.items()}
        task = of_types.get(str(self._config.get("task_type")))
        if task not in _HEADS:
            task = None
        if task in CLASSIFICATION and self._num_labels is not None:
            hf_config.num_labels = self._num_labels
        model = family_of(hf_config.model_type).model_config(hf_config, task)
        return Description(with_adapters(model, self.lora()), hf_config)


def load_adapter(
    chunks: Iterable[Any],
    model: ModelConfig,
    path: Path,
) -> None:
    """Load an adapter into this rank's model chunks. Collective over the world.

    Raises:
        CheckpointError: On every rank, if the adapter is damaged or of another model.
    """
    WeightLoader(chunks, model, [AdapterSource(path)]).fill()


def describe_with_base(
    adapters: Source, config: Path | None, base_path: Path | None
) -> ModelSource:
    """Open the base model of adapters, and describe both.

    Args:
        adapters: Source that holds adapters only.
        config: Config of the base model; see ``Source.describe``.
        base_path: The base model as the user gives it: a directory, an address, or a name on the hub. None: the one
            that the adapters name, if it is a directory or in the hub's cache.

    Raises:
        CheckpointError: If there is no such base model, or the adapters do not match it.
    """
    try:
        if base_path is None:
            folder = named_folder(str(adapters.base), "model", "base")
        else:
            folder = local_folder(base_path, "model")
        base = ModelSource.of(HuggingFaceSource(folder), config)
    except ConfigError as error:
        raise CheckpointError(
            f"{adapters.path}: expected its base {base_path or adapters.base}, whose weights its adapters need, got "
            f"none ({error})"
        ) from None
    adapted, hf_config = adapters.describe(config or base.path)
    return ModelSource(
        # The last one that has a tensor gives it: a head that was trained with adapters.
        parts=(*base.parts, adapters),
        model=replace(
            base.model,
            task=adapted.task,
            num_labels=adapted.num_labels,
            problem_type=adapted.problem_type,
            classifier_bias=adapted.classifier_bias,
            classifier_dropout=adapted.classifier_dropout,
            lora=adapted.lora,
            lora_dropout=adapted.lora_dropout,
        ),
        hf_config=hf_config if adapted.task in _HEADS else base.hf_config,
        kind=f"{adapters.kind} and its base",
        base=str(base.path),
        companions=adapters.companions or base.companions,
    )


# ---- saving ---------------------------------------------------------------------------------------------------------


def save_adapter(
    chunks: Iterable[Any], model: ModelConfig, directory: Path, base: str | None
) -> None:
    """Save an adapter that ``PeftModel.from_pretrained`` loads. Collective over the world; rank 0 writes.

    Args:
        chunks: This rank's model chunks.
        model: Config that the chunks were built from.
        directory: Target, created if it does not exist; other files in it are kept.
        base: Name or directory of the base model; None if unknown.

    Raises:
        CheckpointError: On every rank, if a file cannot be written.
    """
    # The engine's import takes seconds.
    from lightning_megatron.engine.collectives import raise_on_all_ranks

    gatherer = WeightGatherer(chunks, model, lambda key: is_trained_with_lora(key.name))
    tensors: dict[str, Tensor] = {}
    for name, tensor in gatherer.tensors():
        if tensor is not None:
            tensors[_PREFIX + name.removeprefix(_PREFIX)] = tensor.clone()

    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            with (
                failures_as_errors(f"adapter {directory} is not written"),
                staged(directory, "adapter", last=(CONFIG,), error=CheckpointError) as folder,
            ):
                write_weight_file(folder, WEIGHTS, tensors)
                text = json.dumps(
                    _adapter_config(model, base),
                    indent=2,
                    sort_keys=True,
                )
                (folder / CONFIG).write_text(f"{text}\n")


def _adapter_config(model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Fields of ``adapter_config.json``; each target is the shortest suffix that matches no module without adapter."""
    lora = model.lora
    assert lora is not None
    rules = rules_of(replace(model, lora=None))
    linears = linear_rules(rules)
    adapted: set[str] = set()
    for name, parts in lora.linears:
        adapted.update(itertools.compress(linears[name].modules, parts))
    others = {name for rule in rules for name in rule.modules} - adapted
    targets = {_shortest_suffix(module, others) for module in adapted}
    alpha = lora.alpha
    if alpha == int(alpha):
        alpha = int(alpha)
    heads = _HEADS.get(model.task)
    return {
        "peft_type": "LORA",
        "modules_to_save": heads and list(heads),
        "task_type": _TASKS.get(model.task),
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": sorted(targets),
        "fan_in_fan_out": any(linears[name].transposed for name, _ in lora.linears),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _shortest_suffix(module: str, others: Collection[str]) -> str:
    """The shortest suffix of a module's name that matches none of ``others``."""
    words = module.split(".")
    for length in range(1, len(words)):
        suffix = ".".join(words[-length:])
        if not any(_matches(other, suffix) for other in others):
            return suffix
    raise AssertionError(module)
