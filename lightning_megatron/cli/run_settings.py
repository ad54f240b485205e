"""The settings of a run that ``config`` writes: their places, defaults, meanings and readers, and their YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError

Settings = dict[str, Any]
"""Values by their places, as options on the command line are named: ``trainer.strategy.tp``."""


class Setting(NamedTuple):
    """One line of the YAML, and one question."""

    place: str
    default: Any
    """None: the line is left out where nobody gives a value."""
    kind: str
    """How an answer is read."""
    meaning: str


_STRATEGY, _MODEL, _DATA = "trainer.strategy", "model", "data"
SETTINGS = {
    row[0]: Setting(*row)
    for row in (
        ("seed_everything", 1234, "int", "of weights, dropout and the order of data"),
        ("trainer.accelerator", "gpu", "accelerator", "gpu, or cpu for trying a layout without one"),
        ("trainer.devices", 1, "int", "processes on each machine, one for each GPU: a multiple of tp x pp in all"),
        ("trainer.num_nodes", 1, "int", "machines"),
        (f"{_STRATEGY}.class_path", "MegatronStrategy", "text", ""),
        (f"{_STRATEGY}.tp", 1, "int", "tensor parallel size: processes that split each layer; divides the heads"),
        (f"{_STRATEGY}.pp", 1, "int", "pipeline parallel size: stages that split the layers; divides their number"),
        (f"{_STRATEGY}.cp", None, "int", "context parallel size"),
        (f"{_STRATEGY}.num_microbatches", 1, "int", "microbatches of a step: gradients add up; keeps a pipeline busy"),
        (f"{_STRATEGY}.sequence_parallel", True, "bool", "split activations over tp, too: less memory at no cost"),
        (
            f"{_STRATEGY}.distributed_optimizer",
            True,
            "bool",
            "shard the optimizer's state over the copies of the model",
        ),
        (
            f"{_STRATEGY}.recompute",
            "selective",
            "recompute",
            "again in backward, for less memory: no, selective (attention), full",
        ),
        (f"{_STRATEGY}.recompute_method", None, "text", "for full: uniform (all layers) or block (the first ones)"),
        (
            f"{_STRATEGY}.recompute_num_layers",
            None,
            "int",
            "for full: layers of a group (uniform) or of a stage (block)",
        ),
        (f"{_STRATEGY}.load_weights_only", None, "bool", "ckpt_path gives weights alone, and training starts anew"),
        ("trainer.precision", "bf16-mixed", "precision", "bf16-mixed, 16-mixed or 32-true; weights have fp32 copies"),
        ("trainer.max_steps", 10000, "int", "optimizer steps"),
        ("trainer.val_check_interval", 0.1, "float", "validate ten times in a run; or every so many steps"),
        ("trainer.limit_val_batches", 100, "int", "batches of a validation"),
        ("trainer.log_every_n_steps", 10, "int", ""),
        ("trainer.gradient_clip_val", 1.0, "float", "largest global norm of gradients; 0 clips nothing"),
        (f"{_MODEL}.class_path", "MegatronModule", "text", ""),
        (f"{_MODEL}.model", {"model_type": "gpt2"}, "text", "folder or config.json of Hugging Face, or its fields"),
        (f"{_MODEL}.pretrained", None, "bool", "start from the weights in that folder"),
        (f"{_MODEL}.position_embedding_type", None, "positions", "of a GPT from scratch"),
        (f"{_MODEL}.lr", 3e-4, "float", "peak learning rate"),
        (f"{_MODEL}.lr_schedule.style", "linear", "text", "from the peak down: linear, cosine, constant, WSD, ..."),
        (f"{_MODEL}.lr_schedule.warmup_fraction", 0.01, "float", "of max_steps, up to the peak"),
        (f"{_DATA}.class_path", "IndexedDataModule", "text", ""),
        (f"{_DATA}.data_path", "data/corpus_text_document", "text", "dataset that preprocess wrote: PREFIX.bin, .idx"),
        (f"{_DATA}.tokenizer", None, "text", "folder of the tokenizer"),
        (f"{_DATA}.split", "949,50,1", "text", "weights of training, validation and test"),
        (f"{_DATA}.seq_length", 1024, "int", "tokens of a row"),
        (
            f"{_DATA}.micro_batch_size",
            4,
            "int",
            "rows of a microbatch; a global batch: this x num_microbatches x copies",
        ),
    )
}
_YES_OR_NO = {"yes": True, "no": False, "true": True, "false": False, "y": True, "n": False, "1": True, "0": False}
_CHOICES: dict[str, dict[str, Any]] = {
    "bool": _YES_OR_NO,
    "recompute": {"selective": "selective", "full": "full", "no": None, "yes": "selective"}
    | {"true": "selective", "false": None, "none": None},
    "precision": {"bf16": "bf16-mixed", "fp16": "16-mixed", "no": "32-true"}
    | {name: name for name in ("bf16-mixed", "16-mixed", "32-true", "bf16-true")}
    | {"true": "16-mixed", "false": "32-true"},
    "accelerator": {"gpu": "gpu", "cpu": "cpu", "true": "cpu", "false": "gpu"},
    "positions": {"true": "rotary", "false": None},
}


def read(kind: str, value: Any) -> Any:
    """A value as it is meant, whether it was typed or stands in a file as a number, a word or a string.

    Raises:
        ConfigError: If it is none of this kind: what was expected, and what was given.
    """
    text = str(value).strip()
    choices = _CHOICES.get(kind)
    if choices is not None and text.lower() in choices:
        return choices[text.lower()]
    if choices is not None:
        shown = {meant: word for word, meant in reversed(choices.items())}
        raise ConfigError(f"expected {' or '.join(reversed(shown.values()))}, got {text!r}")
    if kind == "text":
        return text
    least = 1 if kind == "int" else 0
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        number = -1
    if not number >= least:  # NaN is neither
        raise ConfigError(f"expected {'an integer' if kind == 'int' else 'a number'} of at least {least}, got {text!r}")
    return number


def layout(settings: Mapping[str, Any]) -> ParallelConfig:
    """How the model is split, as far as ``settings`` say; checked against the number of processes.

    Raises:
        ConfigError: If the sizes do not fit together.
    """
    names = ("tp", "pp", "cp", "sequence_parallel", "num_microbatches")
    given = {name: settings[f"{_STRATEGY}.{name}"] for name in names if f"{_STRATEGY}.{name}" in settings}
    parallel = ParallelConfig(**given)
    devices = settings.get("trainer.devices")
    if isinstance(devices, int):
        parallel.data_parallel_size(devices * settings["trainer.num_nodes"])
    return parallel


def as_yaml(settings: Mapping[str, Any]) -> str:
    """The YAML for ``fit``, each line with its meaning."""
    return "\n".join(_lines(settings)) + "\n"


def _lines(settings: Mapping[str, Any]) -> Iterator[str]:
    import yaml

    sections: list[str] = []
    for place, setting in SETTINGS.items():
        value = settings.get(place, setting.default)
        if value is None and place not in settings:
            continue
        *parents, name = place.split(".")
        # Options of a class stand one level deeper than on the command line.
        for depth in reversed(range(1, len(parents) + 1)):
            if name != "class_path" and f"{'.'.join(parents[:depth])}.class_path" in SETTINGS:
                parents.insert(depth, "init_args")
        for depth, section in enumerate(parents):
            if parents[: depth + 1] != sections[: depth + 1]:
                yield from [""] * (depth == 0)
                yield f"{'  ' * depth}{section}:"
        sections = parents
        shown = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
        yield f"{'  ' * len(parents)}{name}: {shown}{setting.meaning and f' # {setting.meaning}'}"
