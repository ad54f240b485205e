"""What commands write from the golden files: exports, datasets, texts and orders of samples; for rank functions."""

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.checkpoint.runs import read_tensors
from tests.cli.command import run_here
from tests.golden.runs import MODELS, SAMPLES, plain_bytes, trained

Tensors = dict[str, str]
"""By name: shape, dtype and a hash of the content."""

DATASETS = {
    "books": "--tokenizer {} --append-eod --json-keys text title",
    "web": "--tokenizer {} --append-eod",
    "books_pieces": "--tokenizer {} --split-sentences",
    "books_words": "--tokenizer {} --split-sentences",
}
"""Prefix of each dataset, which begins with its corpus, and the options of ``preprocess``."""
PROMPTS = ("the new man of", "who are you")
TEXTS = {
    "greedy": "--max-new-tokens 8",
    "beams": "--num-beams 3 --length-penalty 1.5 --num-return-sequences 2 --max-new-tokens 6",
    "drawn": "--temperature 1.5 --top-p 0.9 --top-p-decay 0.95 --seed 3 --max-new-tokens 8",
}
"""Options of ``generate``."""


def command(line: str, *values: object) -> str:
    """What a command prints, run as by one process of its own.

    Args:
        line: Words, in which ``{}`` stands for the next value.
        values: What stands for ``{}``, and what follows the line.
    """
    rest = iter(values)
    words = [str(next(rest)) if word == "{}" else word for word in line.split()]
    ((code, out, err),) = run_here(".", [[*words, *map(str, rest)]])
    assert code == 0, f"{line}: {err}"
    return out


def make_datasets(files: Path, work: Path) -> None:
    """Indexed datasets of the corpora in ``files``, and two of them merged."""
    for name, options in DATASETS.items():
        corpus, tokenizer = name.split("_")[0], "pieces" if name == "books_pieces" else "words"
        line = f"preprocess --input {{}} --output-prefix {{}} {options}"
        command(line, files / f"{corpus}.jsonl", work / name, files / tokenizer)
    parts = (work / f"{name}_text_document" for name in ("books", "web"))
    command("merge --output-prefix {} --input", work / "merged", *parts)


def samples(files: Path, work: Path) -> dict[str, Any]:
    """Hashes of the rows of each of ``SAMPLES`` in their order."""
    return {
        name: {
            str(step): {key: " ".join(rows) for key, rows in numbers.items() if "rows" in key}
            for step, numbers in trained(run, files, work).items()
        }
        for name, run in SAMPLES.items()
    }


def exports(checkpoints: Path, work: Path) -> dict[str, Any]:
    """Each checkpoint in each format."""
    kinds = (hugging_face_export, legacy_export, legacy_import, megatron_export)
    return {path.name: {kind.__name__: kind(path, work) for kind in kinds} for path in sorted(checkpoints.iterdir())}


def hugging_face_export(path: Path, work: Path) -> dict[str, Any]:
    """A checkpoint as a model directory."""
    from safetensors.torch import load_file

    target = work / f"{path.name}-hf"
    command("convert --to hf --load-path {} --save-path {}", path, target)
    tensors = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    known = {*next(model for model in MODELS.values() if model["model_type"] == config["model_type"]), "architectures"}
    return {"tensors": _described(tensors), "config": {name: config[name] for name in sorted(known) if name in config}}


def legacy_export(path: Path, work: Path) -> dict[str, Any]:
    """A checkpoint as Megatron-LM's files of tp=2, pp=2: the weights of each rank, and the arguments."""
    import torch

    target = work / f"{path.name}-legacy"
    layout = "--tp 2 --pp 2 --make-vocab-size-divisible-by 8"
    command(f"convert --to megatron-legacy {layout} --load-path {{}} --save-path {{}}", path, target)
    found: dict[str, Any] = {}
    for file in sorted(target.rglob("model_optim_rng.pt")):
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, weights_only=True)
        arguments = {name: str(value) for name, value in vars(state["args"]).items() if name != "hugging_face_config"}
        plain = {"version": state["checkpoint_version"], "iteration": state["iteration"], "arguments": arguments}
        found |= {"of all ranks": plain, str(file.relative_to(target)): _described(_flat(state["model"]))}
    return found


def legacy_import(path: Path, work: Path) -> Tensors:
    """What ``legacy_export`` has made, as a model directory."""
    return hugging_face_export(work / f"{path.name}-legacy", work)["tensors"]  # type: ignore[no-any-return]


def megatron_export(path: Path, work: Path) -> Tensors:
    """A checkpoint's weights as another ``*.ckpt``, by torch's reader."""
    target = work / f"{path.name}-core.ckpt"
    line = "convert --to megatron --make-vocab-size-divisible-by 8 --load-path {} --save-path {}"
    command(line, path, target)
    weights = {name: each for name, each in read_tensors(target).items() if not name.startswith("optimizer.")}
    return _described(weights)


def texts(path: Path) -> dict[str, list[str]]:
    """What a checkpoint with a tokenizer and a generation config inside writes."""
    written = {}
    for name, options in TEXTS.items():
        line = f"generate --accelerator cpu --json --checkpoint {{}} {options} --prompt"
        lines = command(line, path, *PROMPTS)
        written[name] = [json.loads(line)["text"] for line in lines.splitlines()]
    return written


def _described(tensors: Mapping[str, Any]) -> Tensors:
    return {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {_hash(tensor)}"
        for name, tensor in sorted(tensors.items())
    }


def _hash(tensor: Any) -> str:
    return hashlib.sha256(plain_bytes(tensor)).hexdigest()[:12]


def _flat(nested: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, value in nested.items():
        tensors |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return tensors
