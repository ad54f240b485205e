"""The command ``config``: a YAML for ``fit`` from questions, from Accelerate's configuration, or from a template.

The YAML is ``run_settings.yaml`` with other values; its comments are the questions, too.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.files import failures_as_errors
from lightning_megatron.foreign_names import advice, foreign_names

if TYPE_CHECKING:
    from lightning_megatron.models.config import ModelConfig

_PACKAGE = Path(__file__).parents[1]
_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: (?P<default>.+?))?(?: #(?P<optional>\??) (?P<meaning>.*))?")
_BOOLEANS = {"yes": True, "no": False, "true": True, "false": False, "y": True, "n": False, "1": True, "0": False}
_RECOMPUTE = {"selective": "selective", "full": "full", "no": None, "yes": "selective", "true": "selective"}
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "no": "32-true", "true": "16-mixed", "false": "32-true"}
_CHOICES: dict[str, dict[str, Any]] = {
    "bool": _BOOLEANS,
    "recompute": {**_RECOMPUTE, "false": None, "none": None},
    "precision": {**_PRECISIONS, **{name: name for name in ("bf16-mixed", "16-mixed", "32-true")}},
    "accelerator": {"gpu": "gpu", "cpu": "cpu", "true": "cpu", "false": "gpu"},
    "positions": {"true": "rotary", "false": None},
}
"""What may be written for settings that are no numbers and no texts; the first name of each value is shown."""
_UNSAID: dict[str, Any] = {
    "trainer.devices": "auto",
    "trainer.num_nodes": 1,
    "trainer.precision": "32-true",
    "trainer.strategy.sequence_parallel": False,
    "trainer.strategy.distributed_optimizer": False,
    "trainer.strategy.recompute": None,
}
"""What Accelerate does where its file says nothing, and we would do something else."""

Settings = dict[str, Any]
"""Values by their places, as options on the command line are named: ``trainer.strategy.tp``."""


def config(
    *,
    from_accelerate: Path | None = None,
    template: str | None = None,
    output: Path = Path("config.yaml"),
    overwrite: bool = False,
) -> None:
    """Write a configuration: from questions, Accelerate's, or a template.

    It is a YAML for fit, every line with its meaning. Without an option it asks the questions of accelerate config for
    Megatron-LM, and for model and data; each answer is checked at once, an empty one takes the default in brackets.
    docs/from_accelerate.md shows what each key of Accelerate's is called here.

    Args:
        from_accelerate: YAML or JSON that accelerate config wrote.
        template: One that comes with the package; another name lists them.
        output: What to write.
        overwrite: Replace the file if there is one.

    Examples:
        lightning-megatron config
        lightning-megatron config --from-accelerate ~/.cache/huggingface/accelerate/default_config.yaml
        lightning-megatron config --template gpt2_small --output gpt2.yaml
        lightning-megatron config --output try.yaml < answers.txt

    Raises:
        ConfigError: If an option, a file or an answer is wrong.
    """
    if template is not None and from_accelerate is not None:
        raise ConfigError("--template and --from-accelerate are two sources; give one of them")
    text = "" if template is None else _template(template, output)
    check_output("--output", output, overwrite)  # before any question
    told = f"{template}. Edit it, and run what its first lines say."
    if template is None:
        if from_accelerate is None:
            settings, origin = _interview(), "made by lightning-megatron config"
            told = f"Run\n\n{_how_to_run(output, settings, {})}"
        else:
            settings, launch = _imported(from_accelerate)
            origin = f"made from {from_accelerate.name}, which says nothing of model and data: change those"
            told = f"Edit model and data in it, then run\n\n{_how_to_run(output, settings, launch)}"
        text = f"# {' '.join(origin.split())}.\n#\n#   lightning-megatron fit --config {shlex.quote(str(output))}\n"
        text += as_yaml(settings)
    with failures_as_errors(f"--output {output} cannot be written"):
        output.write_text(text, encoding="utf-8")
    print(f"{output} is written{': ' if template else '. '}{told}")


def check_output(option: str, path: Path, overwrite: bool) -> None:
    """Refuse a file that would replace another one, or that cannot be written.

    Raises:
        ConfigError: With the option that names it.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise ConfigError(f"{option} {path} exists; give another name, or --overwrite")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: {folder} is no folder that can be written; make it, or give another name")


def _template(name: str, output: Path) -> str:
    """One of configs/, which is beside the package in a checkout, and within it where it is installed."""
    folder = next(each for each in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if each.is_dir())
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in files:
        raise ConfigError(f"--template {name} is unknown; choose from {', '.join(files)}")
    return files[name].read_text(encoding="utf-8").replace(f"configs/{name}.yaml", shlex.quote(str(output)))


def _how_to_run(output: Path, settings: Mapping[str, Any], launch: Mapping[str, str]) -> str:
    """Command lines, by Accelerate's words for how processes meet."""
    fit, nodes = f"fit --config {shlex.quote(str(output))}", settings["trainer.num_nodes"]
    gpus, port = launch.get("gpu_ids", "all"), launch.get("main_process_port")
    torchrun = "  " if gpus == "all" else f"  CUDA_VISIBLE_DEVICES={shlex.quote(gpus)} "
    alone = f"{torchrun}lightning-megatron {fit}\n  or\n"
    torchrun += f"torchrun --nproc-per-node={settings['trainer.devices']}"
    module = f" -m lightning_megatron {fit}"
    if nodes == 1:
        return alone + torchrun + (f" --master-port={port}" if port else "") + module
    torchrun += f" --nnodes={nodes} --node-rank={launch.get('machine_rank', 0)}"
    torchrun += f" --rdzv-backend={launch.get('rdzv_backend', 'static')}"
    torchrun += f" --rdzv-endpoint={launch.get('main_process_ip', 'FIRST_MACHINE')}:{port or 29500}"
    return f"{torchrun}{module}\n\non this machine, and on the others with their own --node-rank"


# ---- settings -------------------------------------------------------------------------------------------------------


@functools.cache
def _lines() -> tuple[tuple[str, str, re.Match[str] | None], ...]:
    """Each line of the file with its place and parts; empty and None where there is no setting."""
    lines: list[tuple[str, str, re.Match[str] | None]] = []
    above: list[tuple[int, str]] = []
    text = Path(__file__).with_name("run_settings.yaml").read_text(encoding="utf-8")
    for line in text.splitlines()[1:]:
        match = _LINE.fullmatch(line)
        if match is not None:
            depth = len(match["indent"])
            above = [*(each for each in above if each[0] < depth), (depth, match["name"])]
        is_setting = match is not None and match["default"] is not None
        place = ".".join(name for _, name in above if name != "init_args")
        lines.append((place if is_setting else "", line, match if is_setting else None))
    return tuple(lines)


def _read(kind: str, value: Any) -> Any:
    """A value as it is meant, whether it was typed or stands in a file as a number, a word or a string.

    Raises:
        ConfigError: If it is none of this kind: what was expected, and what was given.
    """
    text = str(value).strip()
    if kind in _CHOICES:
        choices = _CHOICES[kind]
        if text.lower() in choices:
            return choices[text.lower()]
        shown = {meant: word for word, meant in reversed(choices.items())}
        raise ConfigError(f"expected {' or '.join(reversed(shown.values()))}, got {text!r}")
    if kind in ("text", "str", "dict"):
        return text
    if kind == "ints":
        return [_read("int", each) for each in re.findall(r"[^\s,\[\]]+", text)]
    least = 1 if kind == "int" else 0
    try:
        number = float(text) if kind == "float" else int(text)
    except ValueError:
        number = -1
    if not number >= least:  # NaN is neither
        noun = "a number" if kind == "float" else "an integer"
        raise ConfigError(f"expected {noun} of at least {least}, got {text!r}")
    return number


def _layout(settings: Mapping[str, Any]) -> ParallelConfig:
    """How the model is split, as far as ``settings`` say; checked against the number of processes.

    Raises:
        ConfigError: If the sizes do not fit together.
    """
    places = {field.name: f"trainer.strategy.{field.name}" for field in fields(ParallelConfig)}
    parallel = ParallelConfig(**{name: settings[place] for name, place in places.items() if place in settings})
    devices = settings.get("trainer.devices")
    if isinstance(devices, int):
        parallel.data_parallel_size(devices * settings["trainer.num_nodes"])
    return parallel


def as_yaml(settings: Mapping[str, Any]) -> str:
    """The YAML for ``fit``, each line with its meaning."""
    lines = []
    for place, text, match in _lines():
        if match is None or (place not in settings and not match["optional"]):
            lines.append(text)
        elif place in settings:
            shown = yaml.safe_dump([settings[place]], default_flow_style=True, width=10**6, allow_unicode=True)
            comment = match["meaning"] and f" # {match['meaning']}"
            lines.append(f"{match['indent']}{match['name']}: {shown.strip()[1:-1]}{comment or ''}")
    return "\n".join(lines) + "\n"


# ---- questions ------------------------------------------------------------------------------------------------------


def _interview() -> Settings:
    """The answers to the questions of ``accelerate config``, each checked against those before it.

    Raises:
        ConfigError: If an answer that comes from a pipe is wrong, or there are too few.
    """
    settings: Settings = {}
    for place, default in _questions(settings):
        while place not in settings:
            try:
                settings[place] = _answer(place, default)
                _, model = described_model(settings["model.model"])
                parallel = _layout(settings)
                parallel.check_model(model)
                parallel.check_sequence(settings.get("data.seq_length", parallel.tp), _longest(model))
            except EOFError:
                raise ConfigError(
                    f"{place}: expected an answer, got the end of the input (none is {default})"
                ) from None
            except ConfigError as error:
                if not sys.stdin.isatty():
                    raise
                settings.pop(place, None)
                print(f"  {error}")
    settings["model.model"], _ = described_model(settings["model.model"])
    return settings


def _questions(given: Settings) -> Iterator[tuple[str, Any]]:
    """What to ask next, and what no answer means; in the order of ``accelerate config``."""
    strategy = "trainer.strategy"
    yield "model.model", "gpt2"
    named, model = described_model(given["model.model"])
    folder = Path(named) if isinstance(named, str) else None  # or a file, or a name
    if folder and (not folder.exists() or any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))):
        yield "model.pretrained", "yes"
    yield "trainer.accelerator", "gpu" if shutil.which("nvidia-smi") else "cpu"
    yield "trainer.num_nodes", 1
    yield f"{strategy}.tp", 1
    if given[f"{strategy}.tp"] > 1:
        yield f"{strategy}.sequence_parallel", "yes"
    yield f"{strategy}.pp", 1
    if given[f"{strategy}.pp"] > 1:
        yield f"{strategy}.num_microbatches", given[f"{strategy}.pp"]
    yield f"{strategy}.recompute", "selective"
    yield f"{strategy}.distributed_optimizer", "yes"
    yield "trainer.gradient_clip_val", 1.0
    yield "trainer.devices", -(-given[f"{strategy}.tp"] * given[f"{strategy}.pp"] // given["trainer.num_nodes"])
    yield "trainer.precision", "bf16-mixed" if given["trainer.accelerator"] == "gpu" else "32-true"
    yield "data.data_path", f"data/corpus_text_{'document' if model.architecture == 'gpt' else 'sentence'}"
    if (is_text := given["data.data_path"].endswith(".jsonl")) or model.architecture != "gpt":
        yield "data.tokenizer", "data/tokenizer" if folder is None or folder.is_file() else str(folder)
    given["data.class_path"] = "InstructionDataModule" if is_text else "IndexedDataModule"
    yield "data.seq_length", min(1024, _longest(model) or 1024)
    yield "data.micro_batch_size", 4
    yield "model.lr", 2e-5 if given.get("model.pretrained") else 3e-4
    yield "trainer.max_steps", 10000


def _answer(place: str, default: Any) -> Any:
    match = next(match for each, _, match in _lines() if each == place)
    assert match is not None
    kind = match["name"] if match["name"] in _CHOICES else type(yaml.safe_load(match["default"])).__name__
    text = input(f"{match['name']}: {match['meaning']} [{default}]: ")
    if not sys.stdin.isatty():
        print(text)  # as a terminal shows it
    try:
        return _read(kind, text.strip() or default)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _longest(model: ModelConfig) -> int | None:
    """Tokens of a row for which it has positions; None for any number."""
    return model.max_position_embeddings if model.has_position_table else None


@functools.cache
def described_model(answer: str) -> tuple[str | dict[str, str], ModelConfig]:
    """What a configuration says of a path, or of a type with transformers' default sizes; and the model itself."""
    from lightning_megatron.convert.registry import known_families, model_config
    from lightning_megatron.hub import local_folder

    path = Path(answer).expanduser()
    given = {"model_type": answer} if answer in known_families() and not path.exists() else str(path)
    return given, model_config(given if isinstance(given, dict) else str(local_folder(given, "config")))


# ---- Accelerate's file ----------------------------------------------------------------------------------------------


def _imported(path: Path) -> tuple[Settings, dict[str, str]]:
    """What the YAML or JSON of ``accelerate config`` says, and for torchrun; prints what is not taken over, and why.

    Raises:
        ConfigError: If it cannot be read, a key is unknown or asks for what there is not, or values do not fit.
    """
    given = _fields(path)
    rows = {f"{'megatron_lm_' * (row.used_by != 'config')}{row.theirs}": row
            for row in foreign_names() if row.value or row.used_by in ("config", "plugin")}  # fmt: skip
    for key in given:
        if key not in rows:
            fix = advice(key, list(rows)).partition("choose from")[0] or "remove it"
            raise ConfigError(f"{path}: {key} is not among the keys of accelerate config; {fix}")
    settings, launch, left_out = dict(_UNSAID), dict[str, str](), dict[str, list[str]]()
    samples: dict[str, str] = {}
    for key, row in rows.items():
        value = given.get(key)
        if not row.value:
            if key in given:
                reason = "; ".join(filter(None, (row.ours and f"set {row.ours}", row.note)))
                left_out.setdefault(reason, []).append(key)
        elif isinstance(value, (dict, list)) and row.value != "ints":
            raise ConfigError(f"{path}: {key}: expected one value, got a {type(value).__name__}; correct it")
        elif row.value.startswith("="):
            if str(value).strip() != row.value[1:] and (value is not None or key == "distributed_type"):
                raise ConfigError(f"{path}: {key}: expected {row.value[1:]}, got {value}; {row.note}")
        elif value is not None and row.value == "launch":
            launch[key] = str(value)
        elif value is not None:
            assert row.cli_name is not None
            if row.value == "samples":
                samples[key] = row.cli_name
            try:
                settings[row.cli_name] = _read(row.value, value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {key}: {error}; {row.note or 'correct it'}") from None
    processes, nodes = settings["trainer.devices"], settings["trainer.num_nodes"]
    if processes != "auto":  # those of each machine, from those of all
        require_divides("num_machines", nodes, "num_processes", processes)
        settings["trainer.devices"] = processes // nodes
    _layout(settings)
    told = [f"not taken over: {', '.join(keys)}: {why}" for why, keys in left_out.items()]
    for key, place in samples.items():
        try:
            told.append(f"{key}: {_in_steps(settings, place)}")
        except ConfigError as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    print("\n".join(told))
    if "model.lr_schedule.warmup_steps" in settings:
        settings["model.lr_schedule.warmup_fraction"] = None
    return settings, launch


def _in_steps(settings: Settings, place: str) -> str:
    """Turn the samples at ``place`` into steps, whole ones, and say by which global batch.

    Raises:
        ConfigError: If the number of processes is not known, or the batch cannot grow as it should.
    """
    from lightning_megatron.data.loader import BatchRampup, BatchShape

    parallel, rows = _layout(settings), settings.setdefault("data.micro_batch_size", 4)
    if (devices := settings["trainer.devices"]) == "auto":
        raise ConfigError("samples become steps by the number of copies: expected num_processes, got none; add it")
    dp, ramp = parallel.data_parallel_size(devices * settings["trainer.num_nodes"]), None
    if given := settings.get("data.rampup_batch_size"):
        if len(given) != 3:
            raise ConfigError(f"rampup_batch_size: expected START INCREMENT SAMPLES, got {given}; correct it")
        ramp = BatchRampup(*given)
    shape = BatchShape(micro_batch_size=rows, num_microbatches=parallel.num_microbatches, data_parallel_size=dp,
                       data_parallel_rank=0, rampup=ramp)  # fmt: skip
    samples: int = settings[place]
    settings[place] = steps = shape.steps_in(0, samples)
    left = samples - shape.position_after(0, steps)
    size = f"{shape.global_batch_size:,} rows (micro_batch_size={rows} x {parallel.num_microbatches} x dp={dp})"
    grown = "" if ramp is None else f"{ramp.start:,} rows, growing to "
    return f"{samples:,} samples are {steps:,} steps of {grown}{size}{f', and {left:,} are left over' * (left > 0)}"


def _fields(path: Path) -> dict[str, Any]:
    """All keys on one level: the section of Megatron-LM may have lost its indentation."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration of accelerate's: {error}") from None
    section = found.pop("megatron_lm_config", None) or {} if isinstance(found, dict) else {}
    for name, part in ((path, found), (f"{path}: megatron_lm_config", section)):
        if not isinstance(part, dict):
            kind = type(part).__name__
            raise ConfigError(f"{name}: expected keys and values, got a {kind}; run accelerate config again")
    return {str(key): value for key, value in {**found, **section}.items()}
