"""LoRA in ``peft``'s words: its options and names of modules, and its adapter folders in and out.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``; ``PeftModel.from_pretrained`` loads what is
written here, and what ``peft`` has written is read if nothing in it changes the mathematics of plain LoRA.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from lightning_megatron.convert.family import linear_rules
from lightning_megatron.convert.hugging_face import HuggingFaceSource, WeightFiles, read_safetensors, write_weight_file
from lightning_megatron.convert.registry import model_config, read_json, rules_of
from lightning_megatron.convert.shards import Source, WeightGatherer, WeightLoader
from lightning_megatron.engine.adapter_names import is_adapter
from lightning_megatron.errors import CheckpointError, ConfigError, as_options, require_kind, require_number
from lightning_megatron.files import failures_as_errors, staged
from lightning_megatron.hub import local_folder
from lightning_megatron.models.config import Adapters, ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEARS = "all-linear"

_KNOWN_FIELDS = {
    *("base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode", "auto_mapping"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out"),
    *("megatron_core", "qalora_group_size"),
}
"""Fields of a config that are read, or that say nothing about what an adapter computes."""
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base
}
_TASKS = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train low-rank adapters beside frozen weights (Hu et al. 2021, arXiv 2106.09685), as ``peft`` does.

    Args:
        rank: Numbers between the two matrices of an adapter; ``peft``'s ``r``.
        alpha: What adapters give is multiplied by alpha / rank; ``peft``'s ``lora_alpha``.
        dropout: Probability on what adapters read; each has numbers of its own.
        targets: Which linears of layers, by their names in the Hugging Face model or the ends of these: ``q_proj``,
            ``v_proj``, ``mlp.c_proj``; ``all-linear`` for all.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEARS  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Refuse impossible numbers.

        Raises:
            ConfigError: If the rank is not a positive integer, another number is out of range, or no target is given.
        """
        require_kind("lora rank", self.rank, "int")
        require_number("lora rank", self.rank, at_least=1)
        require_number("lora alpha", self.alpha)
        require_number("lora dropout", self.dropout)
        if self.alpha == 0 or self.dropout >= 1:
            raise ConfigError(
                f"lora: expected alpha > 0 and dropout < 1, got alpha={self.alpha} and dropout={self.dropout}; "
                "correct them"
            )
        if not self.targets or (isinstance(self.targets, str) and self.targets != ALL_LINEARS):
            raise ConfigError(
                f"lora targets: expected names of modules as ['q_proj', 'v_proj'], or {ALL_LINEARS!r}, got "
                f"{self.targets!r}; correct targets"
            )
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What a module trains beside frozen weights."""

    lora: LoRA
    source: Path | None
    """The folder of the adapter that training begins with; None for new ones."""
    base: str | None
    """Name or folder of the model with the frozen weights, which checkpoints of weights alone name instead of holding
    them; None where they would be lost."""

    def apply_to(self, model: ModelConfig, model_provider: object) -> ModelConfig:
        """``model`` with the adapters.

        Raises:
            ConfigError: If it has no such linears, or its layers are not this package's.
        """
        if model_provider is not None:
            raise ConfigError("lora: expected this package's layers, got a model_provider; leave one of them out")
        return with_adapters(model, self.lora)


def adaptation(lora: LoRA | Mapping[str, Any] | str | Path | None, base: str | None) -> Adaptation | None:
    """What a user's ``lora`` means.

    Args:
        lora: Options of new adapters, or the folder of one.
        base: The model that gives the frozen weights; None if they are random, or come from a checkpoint.

    Raises:
        ConfigError: If an option is impossible.
        CheckpointError: If the folder holds no adapter of plain LoRA.
    """
    if lora is None:
        return None
    if base is not None and Path(base).exists():
        base = str(Path(base).absolute())
    if isinstance(lora, (str, Path)):
        return Adaptation(lora=AdapterSource(Path(lora)).lora(), source=Path(lora), base=base)
    return Adaptation(lora=as_options(LoRA, lora, "lora"), source=None, base=base)


def with_adapters(model: ModelConfig, lora: LoRA) -> ModelConfig:
    """``model`` with the adapters that ``lora`` asks for.

    Raises:
        ConfigError: If a target is no linear of its layers.
    """
    linears = {name: rule.modules for name, rule in linear_rules(rules_of(model)).items()}
    targets = [""] if lora.targets == ALL_LINEARS else list(lora.targets)
    modules = [module for each in linears.values() for module in each]
    for target in targets:
        if not any(_matches(module, target) for module in modules):
            names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ConfigError(
                f"lora targets: expected linears of {model.family} layers, one of {names}, got {target!r}; correct it"
            )
    adapted = {
        name: tuple(any(_matches(module, target) for target in targets) for module in each)
        for name, each in linears.items()
    }
    found = tuple((name, parts) for name, parts in adapted.items() if any(parts))
    return replace(model, lora=Adapters(rank=lora.rank, alpha=lora.alpha, linears=found), lora_dropout=lora.dropout)


def _matches(module: str, target: str) -> bool:
    """As ``peft`` matches; nothing names everything."""
    return not target or module == target or module.endswith(f".{target}")


# ---- reading --------------------------------------------------------------------------------------------------------


class AdapterSource(HuggingFaceSource):
    """The weights of an adapter folder."""

    kind = "PEFT adapter"
    has_base_weights, has_adapters = False, True

    def __init__(self, path: Path) -> None:
        """Look at its config and its weights; see ``Source``."""
        Source.__init__(self, path)
        if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
            raise CheckpointError(
                f"adapter {path}: expected a folder with {CONFIG} and {WEIGHTS}, got none; correct it"
            )
        self._config = read_json(path / CONFIG)
        self._files = WeightFiles(read_safetensors(path / WEIGHTS))
        self.stored = self._files.tensors
        self.metadata = {"adapter": self._config}
        self.base = str(self._config.get("base_model_name_or_path"))

    def lora(self) -> LoRA:
        """Its options; the targets are those that its weights are of.

        Raises:
            CheckpointError: If it is damaged, or computes something else than plain LoRA.
        """
        for name, value in self._config.items():
            expected = _EXPECTED.get(name, ())
            if value not in expected if expected else value and name not in _KNOWN_FIELDS:
                wanted = " or ".join(map(repr, expected)) or "it unset"
                raise CheckpointError(
                    f"adapter {self.path}: expected {wanted} for {name}, got {value!r}, which changes what it "
                    "computes; use an adapter of plain LoRA"
                )
        modules = (name.removeprefix("base_model.model.").rpartition(".lora_A.")[0] for name in self.stored)
        targets = tuple(dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", module) for module in modules if module))
        names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        try:
            return LoRA(**{ours: self._config[theirs] for ours, theirs in names.items()}, targets=targets)
        except (KeyError, ConfigError) as error:
            raise CheckpointError(f"adapter {self.path} is damaged: {error}; use another") from None

    def describe(self, config: Path | None) -> None:
        """See ``Source``; ``config`` is the base's."""
        assert config is not None
        self.model = with_adapters(model_config(config), self.lora())


def load_adapter(chunks: Iterable[Any], model: ModelConfig, path: Path) -> None:
    """Fill the adapters of this rank's chunks with those of a folder. Every rank must call.

    Raises:
        CheckpointError: If it is damaged, or of another model: on all ranks alike.
    """
    source = AdapterSource(path)
    source.model = model
    WeightLoader(chunks, source).fill()


def describe_with_base(adapters: Source, config: Path | None) -> None:
    """Find out which model adapters are of, and open the one that they were trained beside.

    Args:
        adapters: Not described yet.
        config: As for ``Source.describe``, of the base.

    Raises:
        CheckpointError: If there is no such model, or the adapters are not of it.
    """
    try:
        base = HuggingFaceSource(local_folder(str(adapters.base), "model"))
        base.describe(config)
    except ConfigError as error:
        raise CheckpointError(
            f"{adapters.path}: expected its base {adapters.base}, whose weights its adapters need, got none ({error})"
        ) from None
    adapters.describe(config or base.path)
    own = adapters.model
    adapters.model = replace(base.model, lora=own.lora, lora_dropout=own.lora_dropout)
    adapters.kind, adapters.frozen, adapters.base = f"{adapters.kind} and its base", base, str(base.path)
    adapters.hf_config, adapters.companions = base.hf_config, adapters.companions or base.companions


# ---- writing --------------------------------------------------------------------------------------------------------


def save_adapter(chunks: Iterable[Any], model: ModelConfig, directory: Path, base: str | None) -> None:
    """Write an adapter folder that ``PeftModel.from_pretrained`` loads. Every rank must call; rank 0 writes.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.
        directory: Where to, made if it does not exist; other files in it stay.
        base: Name or folder of the model that the adapter belongs to; None where nobody knows.

    Raises:
        CheckpointError: If something cannot be written, on all ranks alike.
    """
    from lightning_megatron.engine.collectives import call_on_all_ranks

    gathered = WeightGatherer(chunks, model, lambda key: is_adapter(key.name)).tensors()
    tensors = {name: tensor.clone() for name, tensor in gathered if tensor is not None}

    def write() -> None:
        if dist.get_rank() == 0:
            with (
                failures_as_errors(f"adapter {directory} is not written"),
                staged(directory, "adapter", last=(CONFIG,), error=CheckpointError) as folder,
            ):
                write_weight_file(folder, WEIGHTS, tensors)
                (folder / CONFIG).write_text(json.dumps(_adapter_config(model, base), indent=2, sort_keys=True) + "\n")

    call_on_all_ranks(write)


def _adapter_config(model: ModelConfig, base: str | None) -> dict[str, Any]:
    """What ``adapter_config.json`` says; targets as short as they name no module without an adapter."""
    lora = model.lora
    assert lora is not None
    rules = rules_of(replace(model, lora=None))
    linears = linear_rules(rules)
    adapted = {each for name, parts in lora.linears for each in itertools.compress(linears[name].modules, parts)}
    others = {name for rule in rules for name in rule.modules} - adapted
    targets = set()
    for words in (module.split(".") for module in adapted):
        ends = (".".join(words[-length:]) for length in range(1, len(words)))
        targets.add(next(end for end in ends if not any(_matches(each, end) for each in others)))
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(model.task),
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": sorted(targets),
        "fan_in_fan_out": any(linears[name].transposed for name, _ in lora.linears),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
