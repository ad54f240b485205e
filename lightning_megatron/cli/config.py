"""The command ``config``: write a YAML for ``fit`` from questions, Accelerate's configuration, or a template.

The YAML is ``run_settings.yaml`` with other values; its comments are also the questions. Slow imports are inside the
functions.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from lightning_megatron.data.batch_shape import BatchRampup, BatchShape
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_divides, type_of
from lightning_megatron.foreign_names import ForeignName, foreign_names, suggest_option
from lightning_megatron.models.layout import check_layout
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.hub import local_folder
from lightning_megatron.storage.paths import open_new
from lightning_megatron.storage.yaml_limits import load_yaml

if TYPE_CHECKING:
    from lightning_megatron.models.config import ModelConfig

_PACKAGE = Path(__file__).parents[1]
_LINE = re.compile(
    r"(?P<indent> *)(?P<name>\w+):(?: (?P<default>.+?))?(?: #(?P<optional>\??) (?P<meaning>.*))?"
)
_BOOLEANS = {
    "yes": True,
    "no": False,
    "true": True,
    "false": False,
    "y": True,
    "n": False,
    "1": True,
    "0": False,
}
PRECISIONS = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "no": "32-true",  # Accelerate's word, which messages name
    "fp32": "32-true",
    "true": "16-mixed",
    "false": "32-true",
}
_CHOICES: dict[str, dict[str, Any]] = {
    "bool": _BOOLEANS,
    "recompute": {
        "selective": "selective",
        "full": "full",
        "no": None,
        "yes": "selective",
        "true": "selective",
        "false": None,
        "none": None,
    },
    "precision": PRECISIONS | {name: name for name in PRECISIONS.values()},
    "accelerator": {"gpu": "gpu", "cpu": "cpu", "true": "cpu", "false": "gpu"},
    "positions": {"true": "rotary", "false": None},
}
"""Accepted spellings of settings that are neither numbers nor strings; messages show the first one of each value."""
_ACCELERATE_DEFAULTS: dict[str, Any] = {
    "trainer.devices": "auto",
    "trainer.num_nodes": 1,
    "trainer.precision": "32-true",
    "trainer.strategy.sequence_parallel": False,
    "trainer.strategy.distributed_optimizer": False,
    "trainer.strategy.recompute": None,
}
"""Accelerate's defaults for missing keys, where they differ from those of this package."""

Settings = dict[str, Any]
"""Values by dotted option names, as on the command line: ``trainer.strategy.tp``."""


def config(
    *,
    from_accelerate: Path | None = None,
    template: str | None = None,
    output: Path = Path("config.yaml"),
    overwrite: bool = False,
) -> None:
    """Write a configuration from questions, Accelerate's configuration, or a template.

    The output is a YAML for fit with comments. Without options it asks the questions of accelerate config for
    Megatron-LM, and for model and data; each answer is checked at once, and an empty one accepts the default in
    brackets. docs/from_accelerate.md lists the equivalents of Accelerate's keys.

    Args:
        from_accelerate: YAML or JSON written by accelerate config.
        template: Configuration of the package to copy; an unknown name lists them.
        output: File to write.
        overwrite: Replace the file if it exists.

    Examples:
        lightning-megatron config
        lightning-megatron config --from-accelerate ~/.cache/huggingface/accelerate/default_config.yaml
        lightning-megatron config --template gpt2_small --output gpt2.yaml
        lightning-megatron config --output try.yaml < answers.txt

    Raises:
        ConfigError: If an option, a file or an answer is wrong.
    """
    if template is not None and from_accelerate is not None:
        raise ConfigError(
            "--template, --from-accelerate: expected one of them, got both; leave one out"
        )
    content = None
    if template is not None:
        content = _template(template, output)
        report = f": {template}. Edit it, and run the command in its first lines."
    check_output("--output", output, overwrite)  # before any question
    if content is None:
        if from_accelerate is None:
            settings = _interview()
            origin = "made by lightning-megatron config"
            report = f". Run\n\n{_how_to_run(output, settings, {})}"
        else:
            settings, launch = _import_accelerate(from_accelerate)
            name = " ".join(from_accelerate.name.split())
            origin = f"made from {name}, which does not describe model and data: change those"
            commands = _how_to_run(output, settings, launch)
            report = f". Edit model and data in it, then run\n\n{commands}"
        content = (
            f"# {origin}.\n#\n#   lightning-megatron fit --config {shlex.quote(str(output))}\n"
        )
        content += as_yaml(settings)
    with failures_as_errors(f"--output {output} cannot be written"), open_new(output) as file:
        file.write(content)
    print(f"{output} is written{report}")


def check_output(option: str, path: Path, overwrite: bool) -> None:
    """Check that an output file does not exist, or may be replaced, and can be written.

    Raises:
        ConfigError: If not; names ``option``.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; give the name of a file")
    if os.path.lexists(path) and not overwrite:
        raise ConfigError(f"{option} {path} exists; give another name, or --overwrite")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{option} {path}: {folder} is not a writable directory; create it, or give another name"
        )


def _template(name: str, output: Path) -> str:
    """Read a file of configs/, which is beside the package in a checkout, and inside the installed package."""
    folder = _PACKAGE / "configs"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "configs"
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in files:
        raise ConfigError(f"--template {name} is unknown; choose from {', '.join(files)}")
    text = files[name].read_text(encoding="utf-8")
    return text.replace(f"configs/{name}.yaml", shlex.quote(str(output)))


def _how_to_run(
    output: Path,
    settings: Mapping[str, Any],
    launch: Mapping[str, str],
) -> str:
    """Command lines that launch the run; ``launch`` has Accelerate's rendezvous options."""
    fit = f"fit --config {shlex.quote(str(output))}"
    start = "  "
    gpus = launch.get("gpu_ids", "all")
    if gpus != "all":
        start += f"CUDA_VISIBLE_DEVICES={shlex.quote(gpus)} "
    torchrun = f"{start}torchrun --nproc-per-node={settings['trainer.devices']}"
    module = f"-m lightning_megatron {fit}"
    nodes = settings["trainer.num_nodes"]
    port = launch.get("main_process_port")
    if nodes == 1:
        if port:
            torchrun += f" --master-port={port}"
        return f"{start}lightning-megatron {fit}\n  or\n{torchrun} {module}"
    address = launch.get("main_process_ip", "FIRST_MACHINE")
    torchrun += f" --nnodes={nodes} --node-rank={launch.get('machine_rank', 0)}"
    torchrun += f" --rdzv-backend={launch.get('rdzv_backend', 'static')}"
    torchrun += f" --rdzv-endpoint={address}:{port or 29500}"
    return f"{torchrun} {module}\n\non this machine, and on the others with their own --node-rank"


# ---- settings -------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    text: str
    option: str
    """Dotted name of the setting; empty for lines without one."""
    match: re.Match[str] | None


@functools.cache
def _lines() -> tuple[_Line, ...]:
    """Lines of run_settings.yaml."""
    lines: list[_Line] = []
    parents: dict[int, str] = {}
    text = Path(__file__).with_name("run_settings.yaml").read_text(encoding="utf-8")
    for line in text.splitlines()[1:]:
        match = _LINE.fullmatch(line)
        option = ""
        if match is not None:
            depth = len(match["indent"])
            parents = {indent: name for indent, name in parents.items() if indent < depth}
            parents[depth] = match["name"]
            if match["default"] is not None:
                option = ".".join(name for name in parents.values() if name != "init_args")
        lines.append(_Line(line, option, match))
    return tuple(lines)


def _parse(kind: str, value: Any) -> Any:
    """Parse a value that was typed, or read from a file in any YAML type.

    Raises:
        ConfigError: If it is not of this kind; names what was expected.
    """
    text = str(value).strip()
    if kind in _CHOICES:
        choices = _CHOICES[kind]
        if text.lower() in choices:
            return choices[text.lower()]
        words: dict[Any, str] = {}
        for word, choice in choices.items():
            words.setdefault(choice, word)
        raise ConfigError(f"expected {' or '.join(words.values())}, got {text!r}")
    if kind in ("text", "str", "dict"):
        return text
    if kind == "ints":
        return [_parse("int", item) for item in re.findall(r"[^\s,\[\]]+", text)]
    minimum = 1 if kind == "int" else 0
    noun = "a number" if kind == "float" else "an integer"
    try:
        number = float(text) if kind == "float" else int(text)
    except ValueError:
        number = -1
    if not number >= minimum:  # also for NaN
        raise ConfigError(f"expected {noun} of at least {minimum}, got {text!r}")
    return number


def _layout(settings: Mapping[str, Any]) -> ParallelConfig:
    """Build the layout from ``settings`` and check it against the number of processes.

    Raises:
        ConfigError: If the sizes are incompatible.
    """
    sizes = {}
    for field in fields(ParallelConfig):
        option = f"trainer.strategy.{field.name}"
        if option in settings:
            sizes[field.name] = settings[option]
    parallel = ParallelConfig(**sizes)
    devices = settings.get("trainer.devices")
    if isinstance(devices, int):
        parallel.data_parallel_size(devices * settings["trainer.num_nodes"])
    return parallel


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Format settings as a commented YAML for ``fit``."""
    lines = []
    for text, option, match in _lines():
        if match is not None and option in settings:
            value = yaml.safe_dump(
                [settings[option]], default_flow_style=True, width=10**6, allow_unicode=True
            )
            line = f"{match['indent']}{match['name']}: {value.strip()[1:-1]}"
            if match["meaning"]:
                line += f" # {match['meaning']}"
            lines.append(line)
        elif match is None or not match["optional"]:
            lines.append(text)
    return "\n".join(lines) + "\n"


# ---- questions ------------------------------------------------------------------------------------------------------


def _interview() -> Settings:
    """Ask the questions of ``accelerate config``, and check each answer together with the previous ones.

    Raises:
        ConfigError: If standard input is not a terminal and an answer is wrong or missing.
    """
    settings: Settings = {}
    for option, default in _questions(settings):
        while option not in settings:
            try:
                settings[option] = _ask(option, default)
                _, model = described_model(settings["model.model"])
                parallel = _layout(settings)
                check_layout(model, parallel)
                parallel.check_sequence(
                    settings.get("data.seq_length", parallel.tp), _max_length(model)
                )
            except EOFError:
                raise ConfigError(
                    f"{option}: expected an answer, got the end of the input (default: {default})"
                ) from None
            except ConfigError as error:
                if not sys.stdin.isatty():
                    raise
                settings.pop(option, None)
                print(f"  {error}")
    settings["model.model"], _ = described_model(settings["model.model"])
    return settings


def _questions(answers: Settings) -> Iterator[tuple[str, Any]]:
    """Options to ask for, with defaults that depend on previous answers, in the order of ``accelerate config``."""
    strategy = "trainer.strategy"
    yield "model.model", "gpt2"
    name, model = described_model(answers["model.model"])
    default_tokenizer = "data/tokenizer"
    if isinstance(name, str):  # a directory, a file, or a name on the hub
        path = Path(name)
        if not path.exists() or [*path.glob("*.safetensors"), *path.glob("*.bin")]:
            yield "model.pretrained", "yes"
        if not path.is_file():
            default_tokenizer = name
    yield "trainer.accelerator", "gpu" if shutil.which("nvidia-smi") else "cpu"
    yield "trainer.num_nodes", 1
    yield f"{strategy}.tp", 1
    if answers[f"{strategy}.tp"] > 1:
        yield f"{strategy}.sequence_parallel", "yes"
    yield f"{strategy}.pp", 1
    if answers[f"{strategy}.pp"] > 1:
        yield f"{strategy}.num_microbatches", answers[f"{strategy}.pp"]
    yield f"{strategy}.recompute", "selective"
    yield f"{strategy}.distributed_optimizer", "yes"
    yield "trainer.gradient_clip_val", 1.0
    model_size = answers[f"{strategy}.tp"] * answers[f"{strategy}.pp"]
    yield "trainer.devices", math.ceil(model_size / answers["trainer.num_nodes"])
    on_gpu = answers["trainer.accelerator"] == "gpu"
    yield "trainer.precision", "bf16-mixed" if on_gpu else "32-true"
    is_gpt = model.architecture == "gpt"
    unit = "document" if is_gpt else "sentence"
    yield "data.data_path", f"data/corpus_text_{unit}"
    answers["data.class_path"] = "IndexedDataModule"
    has_instructions = answers["data.data_path"].endswith(".jsonl")
    if has_instructions:
        answers["data.class_path"] = "InstructionDataModule"
    if has_instructions or not is_gpt:
        yield "data.tokenizer", default_tokenizer
    yield "data.seq_length", min(1024, _max_length(model) or 1024)
    yield "data.micro_batch_size", 4
    yield "model.lr", 2e-5 if answers.get("model.pretrained") else 3e-4
    yield "trainer.max_steps", 10000


def _ask(option: str, default: Any) -> Any:
    match = next(line.match for line in _lines() if line.option == option)
    assert match is not None
    kind = match["name"]
    if kind not in _CHOICES:
        kind = type(yaml.safe_load(match["default"])).__name__
    text = input(f"{match['name']}: {match['meaning']} [{default}]: ")
    if not sys.stdin.isatty():
        print(text)  # echo it, as a terminal does
    try:
        return _parse(kind, text.strip() or default)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _max_length(model: ModelConfig) -> int | None:
    """Maximum tokens of a row by the position table; None without a table."""
    return model.max_position_embeddings if model.has_position_table else None


@functools.cache
def described_model(answer: str) -> tuple[str | dict[str, str], ModelConfig]:
    """Value of ``model.model`` for a path or a ``model_type`` (with transformers' default sizes), and its config."""
    from lightning_megatron.convert.registry import known_families, model_config

    path = Path(answer).expanduser()
    if answer in known_families() and not path.exists():
        by_type = {"model_type": answer}
        return by_type, model_config(by_type)
    return str(path), model_config(str(local_folder(str(path), "config")))


# ---- Accelerate's file ----------------------------------------------------------------------------------------------


def _import_accelerate(path: Path) -> tuple[Settings, dict[str, str]]:
    """Translate the file of ``accelerate config`` to settings and launch options; print the ignored keys, and why.

    Raises:
        ConfigError: If it cannot be read, or a key or value is unknown, unsupported or incompatible with others.
    """
    source = _read_flat(path)
    rows = _accelerate_rows()
    for key in source:
        if key not in rows:
            hint = suggest_option(key, list(rows))
            fix = hint.partition("choose from")[0] or "remove it"
            raise ConfigError(f"{path}: {key} is not among the keys of accelerate config; {fix}")
    settings = dict(_ACCELERATE_DEFAULTS)
    launch: dict[str, str] = {}
    ignored: dict[str, list[str]] = {}
    samples: dict[str, str] = {}
    for key, row in rows.items():
        value = source.get(key)
        if not row.value:
            if key in source:
                set_ours = row.ours and f"set {row.ours}"
                reason = "; ".join(filter(None, (set_ours, row.note)))
                ignored.setdefault(reason, []).append(key)
        elif isinstance(value, (dict, list)) and row.value != "ints":
            raise ConfigError(
                f"{path}: {key}: expected one value, got {type_of(value)}; correct it"
            )
        elif row.value.startswith("="):
            expected = row.value[1:]
            is_required = value is not None or key == "distributed_type"
            if is_required and str(value).strip() != expected:
                raise ConfigError(f"{path}: {key}: expected {expected}, got {value}; {row.note}")
        elif value is not None and row.value == "launch":
            launch[key] = str(value)
        elif value is not None:
            assert row.cli_name is not None
            if row.value == "samples":
                samples[key] = row.cli_name
            try:
                settings[row.cli_name] = _parse(row.value, value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {key}: {error}; {row.note or 'correct it'}") from None
    processes = settings["trainer.devices"]
    if processes != "auto":  # per machine, from the total
        nodes = settings["trainer.num_nodes"]
        require_divides("num_machines", nodes, "num_processes", processes)
        settings["trainer.devices"] = processes // nodes
    _layout(settings)
    lines = [f"ignored: {', '.join(keys)}: {reason}" for reason, keys in ignored.items()]
    for key, option in samples.items():
        try:
            lines.append(f"{key}: {_samples_to_steps(settings, option)}")
        except ConfigError as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    print("\n".join(lines))
    if "model.lr_schedule.warmup_steps" in settings:
        settings["model.lr_schedule.warmup_fraction"] = None
    return settings, launch


def _accelerate_rows() -> dict[str, ForeignName]:
    """Rows of the table for keys of ``accelerate config``, by key."""
    rows = {}
    for row in foreign_names():
        if row.used_by == "config":
            rows[row.theirs] = row
        elif row.value or row.used_by == "plugin":
            rows[f"megatron_lm_{row.theirs}"] = row
    return rows


def _samples_to_steps(settings: Settings, option: str) -> str:
    """Convert ``settings[option]`` from samples to complete steps, and describe the conversion in a line.

    Raises:
        ConfigError: If the number of processes is unknown, or the batch size ramp-up is invalid.
    """
    parallel = _layout(settings)
    rows = settings.setdefault("data.micro_batch_size", 4)
    devices = settings["trainer.devices"]
    if devices == "auto":
        raise ConfigError(
            "samples become steps by the number of replicas: expected num_processes, got none; add it"
        )
    dp = parallel.data_parallel_size(devices * settings["trainer.num_nodes"])
    ramp = None
    growth = ""
    if values := settings.get("data.rampup_batch_size"):
        if len(values) != 3:
            raise ConfigError(
                f"rampup_batch_size: expected START INCREMENT SAMPLES, got {values}; correct it"
            )
        ramp = BatchRampup(*values)
        growth = f"{ramp.start:,} rows, growing to "
    shape = BatchShape(
        micro_batch_size=rows,
        num_microbatches=parallel.num_microbatches,
        data_parallel_size=dp,
        data_parallel_rank=0,
        rampup=ramp,
    )
    samples: int = settings[option]
    steps = shape.steps_in(0, samples)
    settings[option] = steps
    message = (
        f"{samples:,} samples are {steps:,} steps of {growth}{shape.global_batch_size:,} rows "
        f"(micro_batch_size={rows} x {parallel.num_microbatches} x dp={dp})"
    )
    rest = samples - shape.position_after(0, steps)
    if rest > 0:
        message += f", and {rest:,} are left over"
    return message


def _read_flat(path: Path) -> dict[str, Any]:
    """Read Accelerate's file as one level of keys; its Megatron-LM section may have lost its indentation."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = json.loads(text)
        else:
            content = load_yaml(text, path.name, yaml.safe_load)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration of Accelerate: {error}"
        ) from None
    _check_mapping(path, content)
    section = content.pop("megatron_lm_config", None) or {}
    _check_mapping(f"{path}: megatron_lm_config", section)
    return {str(key): value for key, value in (content | section).items()}


def _check_mapping(name: object, part: object) -> None:
    if not isinstance(part, dict):
        raise ConfigError(
            f"{name}: expected keys and values, got {type_of(part)}; run accelerate config again"
        )
