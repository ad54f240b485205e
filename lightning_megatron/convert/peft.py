"""LoRA options with ``peft``'s names, and loading and saving of ``peft`` adapters.

An adapter is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``. ``PeftModel.from_pretrained``
loads adapters saved here; adapters saved by ``peft`` are loaded if their config is one of plain LoRA.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.convert import ExpertFormat
from lightning_megatron.convert.expert_adapters import (
    OLDEST_PEFT,
    SeparateExpertAdapters,
    adapted_expert_linears,
    expert_linears,
    fused_tensors,
    in_layer,
    module_pattern,
    separate_tensors,
    take_matrices,
)
from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.convert.registry import config_object, family_of, read_json, rules_of
from lightning_megatron.convert.rules import EXPERT, PEFT_PREFIX, linear_rules
from lightning_megatron.convert.shards import Key
from lightning_megatron.convert.source import Description, ModelSource, Source
from lightning_megatron.convert.weight_files import (
    WeightFiles,
    add_tensor,
    read_safetensors,
    write_weight_file,
)
from lightning_megatron.convert.weight_gatherer import WeightGatherer
from lightning_megatron.convert.weight_loader import WeightLoader
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    as_options,
    require_choice,
    require_kind,
    require_number,
)
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.adapter_names import is_trained_with_lora
from lightning_megatron.models.config import CLASSIFICATION, Adapters, ModelConfig
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.hub import local_folder, named_folder
from lightning_megatron.storage.publish import staged

_log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ALL_LINEARS = "all-linear"

_KNOWN_FIELDS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "target_parameters",
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


_END_OF_NAME = re.compile(r"\^?(\.\*)?(\\?\.|\w)+\$?")
"""Patterns of modules that are evaluated: names, whose ``.`` may be any character, after ``.*`` or alone."""


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
            ``v_proj``, ``mlp.c_proj``; ``all-linear`` for all but those of routed experts.
        target_parameters: Linears of routed experts to adapt, by their names in transformers or suffixes of these:
            ``experts.gate_up_proj``, ``experts.down_proj``; ``peft``'s ``target_parameters``.
        ranks: Other ranks of some targets, by their names or suffixes of these; alpha / rank is the same for all.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEARS  # type: ignore[assignment]
    target_parameters: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ConfigError: If a rank is not a positive integer, another value is out of range, or there is no target.
        """
        object.__setattr__(self, "ranks", dict(self.ranks))
        for name, rank in {"lora rank": self.rank, **_named_ranks(self.ranks)}.items():
            require_kind(name, rank, "int")
            require_number(name, rank, at_least=1, at_most=2**16)
        require_number("lora alpha", self.alpha)
        require_number("lora dropout", self.dropout)
        if self.alpha == 0 or self.dropout >= 1:
            raise ConfigError(
                f"lora: expected alpha > 0 and dropout < 1, got alpha={self.alpha} and dropout={self.dropout}; "
                "correct them"
            )
        is_other_text = isinstance(self.targets, str) and self.targets != ALL_LINEARS
        if is_other_text or not (self.targets or self.target_parameters):
            raise ConfigError(
                f"lora targets: expected names of modules as ['q_proj', 'v_proj'], or {ALL_LINEARS!r}, got "
                f"{self.targets!r}; correct targets"
            )
        if isinstance(self.target_parameters, str):
            raise ConfigError(
                "lora target_parameters: expected names as ['experts.gate_up_proj', 'experts.down_proj'], got "
                f"{self.target_parameters!r}; correct it"
            )
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))
        object.__setattr__(self, "target_parameters", tuple(self.target_parameters))


def _named_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    return {f"lora ranks of {name}": rank for name, rank in ranks.items()}


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
    lora: LoRA | Mapping[str, Any] | str | Path | None,
    base: str | None,
    model: ModelConfig,
) -> Adaptation | None:
    """Parse the ``lora`` option of a module.

    Args:
        lora: Options of new adapters, or the directory of an adapter.
        base: Name or directory of the base model; None if its weights are random or come from a checkpoint.
        model: Config of the base model.

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
            lora=AdapterSource(source).lora(model),
            source=source,
            base=base,
        )
    options = as_options(LoRA, lora, "lora")
    return Adaptation(lora=options, source=None, base=base)


def with_adapters(model: ModelConfig, lora: LoRA) -> ModelConfig:
    """Return ``model`` with adapters on the targets of ``lora``.

    Raises:
        ConfigError: If a target matches no linear layer, or matrices that the engine fuses have different ranks.
    """
    linears = _linears(model)
    targets = [""] if lora.targets == ALL_LINEARS else list(lora.targets)
    for target in targets:
        _check_target(model, target, linears)
    parameters = {linear.megatron: in_layer(linear.parameter) for linear in expert_linears(model)}
    _check_parameters(model, lora.target_parameters, parameters)
    adapted = []
    names: dict[str, list[str]] = {}
    for linear, fused in linears.items():
        parts = tuple(any(_matches(module, target) for target in targets) for module in fused)
        if any(parts):
            adapted.append((linear, parts))
            names[linear] = list(itertools.compress(fused, parts))
    for linear, parameter in parameters.items():
        if any(_matches(parameter, target) for target in lora.target_parameters):
            adapted.append((linear, (True,)))
            names[linear] = [parameter]
    adapters = Adapters(
        rank=lora.rank,
        alpha=lora.alpha,
        linears=tuple(adapted),
        ranks=_ranks(lora, names),
    )
    return replace(model, lora=adapters, lora_dropout=lora.dropout)


def _linears(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Hugging Face's names of the matrices of each linear in a layer, except for routed experts, by Megatron's."""
    rules = linear_rules(rules_of(replace(model, lora=None)))
    return {name: rule.modules for name, rule in rules.items() if model.layers_with(name)}


def _check_target(
    model: ModelConfig,
    target: str,
    linears: Mapping[str, tuple[str, ...]],
) -> None:
    modules = list(itertools.chain.from_iterable(linears.values()))
    if any(_matches(module, target) for module in modules):
        return
    suffixes = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    names = ", ".join(suffixes)
    message = f"lora targets: expected linears of {model.family} layers, one of {names}, got {target!r}; correct it"
    if model.experts is not None:
        message += ", or name routed experts in target_parameters"
    raise ConfigError(message)


def _check_parameters(
    model: ModelConfig,
    targets: Iterable[str],
    parameters: Mapping[str, str],
) -> None:
    for target in targets:
        if any(_matches(parameter, target) for parameter in parameters.values()):
            continue
        expected = "a model with routed experts"
        if parameters:
            expected = f"parameters of experts, one of {', '.join(parameters.values())}"
        raise ConfigError(
            f"lora target_parameters: expected {expected}, got {target!r} for {model.family}; correct it"
        )


def _ranks(lora: LoRA, names: Mapping[str, Sequence[str]]) -> tuple[tuple[str, int], ...]:
    """Adapted linears with another rank than others, by Megatron's names.

    Args:
        lora: The options.
        names: Hugging Face's names of the adapted matrices of each linear.
    """
    unused = set(lora.ranks)
    ranks = []
    for linear, modules in names.items():
        of_linear = set()
        for module in modules:
            matching = [name for name in lora.ranks if _matches(in_layer(module), name)]
            unused.difference_update(matching)
            # The most exact name counts.
            longest = max(matching, key=len, default="")
            of_linear.add(lora.ranks.get(longest, lora.rank))
        if len(of_linear) > 1:
            suffixes = ", ".join(module.rpartition(".")[2] for module in modules)
            raise ConfigError(
                f"lora ranks: expected one rank for {suffixes}, whose weights are one here, got "
                f"{sorted(of_linear)}; correct them"
            )
        rank = of_linear.pop()
        if rank != lora.rank:
            ranks.append((linear, rank))
    if unused:
        raise ConfigError(f"lora ranks: expected names of targets, got {min(unused)!r}; correct it")
    return tuple(ranks)


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
            own = name if ".lora_" in name else name.removeprefix(PEFT_PREFIX)
            add_tensor(self._stored_name, own, name, WEIGHTS)
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

    def lora(self, model: ModelConfig) -> LoRA:
        """Options of the adapter, with the modules and parameters of its weights as targets.

        Args:
            model: Config of the base model.

        Raises:
            CheckpointError: If the adapter is damaged or is not plain LoRA.
        """
        # The type first: other types have fields of their own, with which a message would puzzle.
        for name in sorted(self._config, key=lambda each: each not in _EXPECTED):
            value = self._config[name]
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
        files = SeparateExpertAdapters(WeightFiles(self.stored), model, self._config)
        if model.experts is None:
            self._check_no_experts(files.adapted.values(), model)
        targets: dict[str, int] = {}
        parameters: dict[str, int] = {}
        for name, stored in files.tensors.items():
            if name in files.parameters:
                self._note_rank(parameters, files.parameters[name], stored.shape[0])
            elif name in files.adapted:
                module, own_rank = files.adapted[name]
                self._note_rank(targets, in_layer(module), own_rank)
        try:
            self._check_ranks(files.adapted.values())
            rank = self._config["r"]
            return LoRA(
                rank=rank,
                alpha=self._config["lora_alpha"],
                dropout=self._config["lora_dropout"],
                targets=tuple(targets),
                target_parameters=tuple(parameters),
                ranks={name: own for name, own in {**targets, **parameters}.items() if own != rank},
            )
        except CheckpointError:
            raise
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(f"adapter {self.path} is damaged: {error}; use another") from None

    def _check_no_experts(self, adapted: Iterable[tuple[str, int]], model: ModelConfig) -> None:
        """Check that no adapter is one of routed experts, for a model that has none.

        Raises:
            CheckpointError: If one is.
        """
        for module, _ in adapted:
            if ".experts." in f"{module}.":
                raise CheckpointError(
                    f"adapter {self.path}: expected adapters of {model.family}, which has no routed experts, got one "
                    f"of {module}; give the base that the adapter was trained on"
                )

    def _note_rank(
        self,
        ranks: dict[str, int],
        target: str,
        rank: int,
    ) -> None:
        """Note the rank of a target.

        Raises:
            CheckpointError: If it is another one in another layer.
        """
        if ranks.setdefault(target, rank) != rank:
            raise CheckpointError(
                f"adapter {self.path}: expected one rank of {target} in all layers, got {ranks[target]} and {rank}; "
                "use an adapter of plain LoRA"
            )

    def _check_ranks(self, adapted: Iterable[tuple[str, int]]) -> None:
        """Check that all adapters have the ranks of the config, and are multiplied by the same number.

        Args:
            adapted: Modules and parameters with adapters, and their ranks.

        Raises:
            CheckpointError: If one has another rank or scale, or a pattern is more than the end of a name.
        """
        ranks = self._pattern("rank_pattern")
        alphas = self._pattern("alpha_pattern")
        rank = self._config["r"]
        alpha = self._config["lora_alpha"]
        for module, stored_rank in adapted:
            own_rank = _value_of(module, ranks, rank)
            own_alpha = _value_of(module, alphas, alpha)
            if own_alpha * rank != alpha * own_rank:
                raise CheckpointError(
                    f"adapter {self.path}: expected lora_alpha / r = {alpha} / {rank} for all, got {own_alpha} / "
                    f"{own_rank} for {module}; use an adapter of plain LoRA"
                )
            if stored_rank != own_rank:
                raise CheckpointError(
                    f"adapter {self.path} is damaged: expected rank {own_rank} of {module}, as in {CONFIG}, got "
                    f"weights of rank {stored_rank}; use another"
                )

    def _pattern(self, field_name: str) -> dict[str, float]:
        """Values of ``rank_pattern`` or ``alpha_pattern`` by patterns of ends of names.

        Raises:
            CheckpointError: If one is another regular expression, which is not evaluated: the file is not trusted.
        """
        given: Mapping[str, Any] = self._config.get(field_name) or {}
        for pattern, value in given.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if _END_OF_NAME.fullmatch(pattern) is None or not is_number:
                raise CheckpointError(
                    f"adapter {self.path}: expected numbers by ends of names in {field_name}, got {pattern!r}: "
                    f"{value!r}; use an adapter of plain LoRA"
                )
        return dict(given)

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
        return Description(with_adapters(model, self.lora(model)), hf_config)

    def match(
        self, model: ModelConfig, expected: Mapping[Key, tuple[int, ...]]
    ) -> dict[Key, torch.dtype]:
        """See ``Source``."""
        self._files = SeparateExpertAdapters(self._files, model, self._config)
        return super().match(model, expected)


def _value_of(
    module: str,
    by_end: Mapping[str, float],
    default: Any,
) -> Any:
    """The first value whose pattern is the end of a module's name, as in ``peft``."""
    for end, value in by_end.items():
        if re.fullmatch(rf"(.*\.)?({end})", module):
            return value
    return default


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


def check_expert_format(model: ModelConfig, expert_format: str) -> None:
    """Check the form in which to save adapters of experts.

    Raises:
        ConfigError: If it is none, would do nothing, or is not one of the model's.
    """
    require_choice("expert_format", expert_format, get_args(ExpertFormat))
    if expert_format == "fused":
        return
    adapted = adapted_expert_linears(model)
    if not adapted:
        raise ConfigError(
            f"expert_format={expert_format!r} would do nothing: expected adapters of routed experts, got none; leave "
            "it out"
        )
    if not adapted[0].modules:
        raise ConfigError(
            f"expert_format={expert_format!r}: expected a model whose experts are modules of their own on the hub, got "
            f"{model.family}, whose experts are one parameter; use 'fused'"
        )


def save_adapter(
    chunks: Iterable[Any],
    model: ModelConfig,
    directory: Path,
    base: str | None,
    expert_format: ExpertFormat = "fused",
) -> None:
    """Save an adapter that ``PeftModel.from_pretrained`` loads. Collective over the world; rank 0 writes.

    Args:
        chunks: This rank's model chunks.
        model: Config that the chunks were built from.
        directory: Target, created if it does not exist; other files in it are kept.
        base: Name or directory of the base model; None if unknown.
        expert_format: Form of adapters of experts, which ``check_expert_format`` accepts.

    Raises:
        CheckpointError: On every rank, if a file cannot be written.
    """
    # The engine's import takes seconds.
    from lightning_megatron.engine.collectives import raise_on_all_ranks

    gatherer = WeightGatherer(chunks, model, lambda key: is_trained_with_lora(key.name))
    tensors: dict[str, Tensor] = {}
    for name, tensor in gatherer.tensors():
        if tensor is not None:
            tensors[PEFT_PREFIX + name.removeprefix(PEFT_PREFIX)] = tensor.clone()

    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            with (
                failures_as_errors(f"adapter {directory} is not written"),
                staged(directory, "adapter", last=(CONFIG,), error=CheckpointError) as folder,
            ):
                config = _adapter_config(model, base)
                if expert_format == "per_expert":
                    config |= _put_separate_experts(tensors, config, model)
                else:
                    config |= _put_fused_experts(tensors, config, model)
                write_weight_file(folder, WEIGHTS, tensors)
                text = json.dumps(config, indent=2, sort_keys=True)
                (folder / CONFIG).write_text(f"{text}\n")


def _adapter_config(model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Fields of ``adapter_config.json`` without adapters of experts.

    Each target is the shortest suffix that matches no module without adapter.
    """
    lora = model.lora
    assert lora is not None
    linears = _linears(model)
    rules = linear_rules(rules_of(replace(model, lora=None)))
    adapted = _adapted_modules(model)
    others = {module for modules in linears.values() for module in modules} - set(adapted)
    targets = {_shortest_suffix(module, others) for module in adapted}
    heads = _HEADS.get(model.task)
    return {
        "peft_type": "LORA",
        "modules_to_save": heads and list(heads),
        "task_type": _TASKS.get(model.task),
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": model.lora_dropout,
        "target_modules": sorted(targets),
        "fan_in_fan_out": any(rules[name].transposed for name in _without_experts(lora)),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        **_patterns(adapted, lora, lora.rank),
    }


def _without_experts(lora: Adapters) -> dict[str, tuple[bool, ...]]:
    """Which matrices of each linear have adapters, except for routed experts."""
    return {name: parts for name, parts in lora.linears if ".mlp.experts." not in name}


def _adapted_modules(model: ModelConfig) -> dict[str, int]:
    """Rank of each module with adapters, except for routed experts."""
    assert model.lora is not None
    linears = _linears(model)
    ranks = {}
    for name, parts in _without_experts(model.lora).items():
        for module in itertools.compress(linears[name], parts):
            ranks[module] = model.lora.rank_of(name)
    return ranks


def _patterns(
    ranks: Mapping[str, int],
    lora: Adapters,
    default: int,
) -> dict[str, Any]:
    """``rank_pattern`` and ``alpha_pattern`` of modules and parameters; empty if all have the rank ``default``."""
    others = {in_layer(name): rank for name, rank in ranks.items() if rank != default}
    if not others:
        return {}
    alphas = {name: _number(lora.scale * rank) for name, rank in others.items()}
    return {"rank_pattern": others, "alpha_pattern": alphas}


def _number(value: float) -> float:
    """``value``, as an integer if it is one."""
    return int(value) if value == int(value) else value


def _put_fused_experts(
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    model: ModelConfig,
) -> dict[str, Any]:
    """Replace the matrices of each expert in ``tensors`` by those of all, and return further fields of the config."""
    adapted = adapted_expert_linears(model)
    if not adapted:
        return {}
    assert model.lora is not None
    tensors |= fused_tensors(take_matrices(tensors, model))
    ranks = _adapted_modules(model)
    for linear in adapted:
        ranks[linear.parameter] = model.lora.rank_of(linear.megatron)
    if model.lora_dropout:
        _log.warning(
            "lora_dropout=%s is not in the adapter's config: peft has none for fused experts",
            model.lora_dropout,
        )
    return {
        "target_parameters": [in_layer(linear.parameter) for linear in adapted],
        "lora_dropout": 0.0,
        # Of the names and shapes of these tensors; readers tell a square matrix from its transposed by it.
        "peft_version": OLDEST_PEFT,
        **_patterns(ranks, model.lora, config["r"]),
    }


def _put_separate_experts(
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    model: ModelConfig,
) -> dict[str, Any]:
    """As ``_put_fused_experts``, with tensors of the modules of each expert."""
    assert model.lora is not None
    separate = separate_tensors(take_matrices(tensors, model))
    tensors |= separate
    adapted = _adapted_modules(model)
    linears = adapted_expert_linears(model)
    others = {module for modules in _linears(model).values() for module in modules} - set(adapted)
    targets = list(config["target_modules"])
    ranks: dict[str, int] = {}
    for linear in linears:
        for module in linear.modules:
            targets += _targets_of_experts(module, linear.num_experts, others)
            ranks[module.rpartition(".")[2]] = _rank_of_module(module, separate)
    # peft multiplies this rank alone by the number of modules that are one parameter.
    rank = next(iter(ranks.values()))
    return {
        "target_modules": sorted(set(targets)),
        "r": rank,
        "lora_alpha": _number(model.lora.scale * rank),
        **_patterns({**adapted, **ranks}, model.lora, rank),
    }


def _rank_of_module(module: str, tensors: Mapping[str, Tensor]) -> int:
    pattern = module_pattern(f"{PEFT_PREFIX}{module}.lora_A.weight")
    return next(len(tensor) for name, tensor in tensors.items() if pattern.fullmatch(name))


def _targets_of_experts(
    module: str,
    num_experts: int,
    others: Collection[str],
) -> list[str]:
    """Suffixes that match a module of all experts, and none of ``others``."""
    suffix = module.rpartition(".")[2]
    if not any(_matches(other, suffix) for other in others):
        return [suffix]
    return [in_layer(module).replace(EXPERT, str(expert)) for expert in range(num_experts)]


def _shortest_suffix(module: str, others: Collection[str]) -> str:
    """The shortest suffix of a module's name that matches none of ``others``."""
    words = module.split(".")
    for length in range(1, len(words)):
        suffix = ".".join(words[-length:])
        if not any(_matches(other, suffix) for other in others):
            return suffix
    raise AssertionError(module)
