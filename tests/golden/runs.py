"""Training runs of the golden files, and the outputs of commands on them; for rank functions."""

import argparse
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.checkpoint.runs import NO_DROPOUT, Run, callback, fit, read_tensors
from tests.cli.command import run_here

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "n_positions": 32,
        "vocab_size": 110,
        "resid_pdrop": 0.3,
        "embd_pdrop": 0.3,
        "attn_pdrop": 0.3,
        "initializer_range": 0.2,
    },
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "vocab_size": 110,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    },
    "bert": {
        "model_type": "megatron-bert",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "vocab_size": 110,
        "initializer_range": 0.2,
    },
    "t5": {
        "model_type": "t5",
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "vocab_size": 110,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}
"""Hugging Face configs with the vocabulary size of the golden tokenizers."""


# ---- runs: data prefixes and tokenizers are relative to the directory of files -------------------------------------

Steps = dict[int, dict[str, Any]]
"""By global step: loss, learning rate, gradient norm, and a hash of each row of the batch."""

BLEND = Run(
    model=MODELS["gpt2"],
    indexed={"data_path": [0.7, "books_text_document", 0.3, "web_text_document"], "split": "8,1,1"},
    strategy={"tp": 2, "pp": 2},
    trainer={"max_steps": 6, "precision": "bf16-mixed"},
)
WITHOUT_DROPOUT = replace(
    BLEND,
    strategy={},
    model={**MODELS["gpt2"], **NO_DROPOUT},
)
"""For comparisons at other layouts, whose ranks draw other random numbers."""
SHUFFLED = Run(model=MODELS["llama"], trainer={"max_epochs": 3})
"""Five steps per epoch, on two replicas."""
BERT = Run(
    model={**MODELS["bert"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    indexed={"data_path": "books_pieces_text_sentence", "split": "1,0,0", "tokenizer": "pieces"},
    strategy={"tp": 2},
    trainer={"max_steps": 5},
)
T5 = Run(
    model={**MODELS["t5"], "dropout_rate": 0.0},
    indexed={
        "data_path": "books_words_text_sentence",
        "split": "1,0,0",
        "tokenizer": "words",
        "seq_length_decoder": 8,
    },
    strategy={"pp": 2},
    trainer={"max_steps": 5},
)
RUNS: dict[str, tuple[Run, int]] = {
    "blend": (BLEND, 4),
    "shuffled": (SHUFFLED, 2),
    "bert": (BERT, 2),
    "t5": (T5, 2),
}
"""Run and number of ranks by name; ``NAME.ckpt`` was saved in the middle of the run."""

_INSTRUCTIONS = Run(
    model=WITHOUT_DROPOUT.model,
    indexed={
        "data_path": "instructions.jsonl",
        "split": "1,0,0",
        "tokenizer": "words",
        "seq_length": 32,
    },
    data_module="InstructionDataModule",
    trainer={"max_epochs": 3},
)
SAMPLES: dict[str, Run] = {
    "gpt, whole run": replace(WITHOUT_DROPOUT, trainer={"max_steps": 40}),
    "gpt, epochs": replace(
        WITHOUT_DROPOUT,
        indexed={
            "data_path": ["web_text_document", "books_text_document"],
            "split": "8,2,0",
            "seed": 5,
        },
        trainer={"max_epochs": 3},
    ),
    "bert, whole run": replace(BERT, strategy={}, trainer={"max_steps": 16}),
    "t5, epochs": replace(T5, strategy={}, trainer={"max_epochs": 2}),
    "instructions": _INSTRUCTIONS,
    "instructions, packed": _INSTRUCTIONS.but(indexed={"packing": True, "answers": "last"}),
}
"""Runs from the first step on one rank, for several epochs, of which only the samples are compared."""


def train(run: Run, files: Path, work: Path) -> Steps:
    """Train and return the steps of this rank.

    Args:
        run: The run.
        files: Directory of datasets and tokenizers.
        work: Directory for the caches.
    """
    from lightning_megatron import LRSchedule

    schedule = LRSchedule(style="linear", warmup_steps=2, decay_steps=20)
    run = run.but(module={"lr_schedule": schedule, "make_vocab_size_divisible_by": 8})
    if isinstance(run.indexed, Mapping):
        paths = {
            key: _absolute(files, run.indexed[key])
            for key in ("data_path", "tokenizer")
            if key in run.indexed
        }
        run = run.but(indexed={"index_cache": str(work / "cache"), **paths})
    rows: Steps = {}
    """Row hashes of each step, and of the validation after it."""

    def record_rows(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        rows[trainer.global_step + 1] = {"rows": row_hashes(batch)}

    def record_validation(
        trainer: Any,
        module: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        if trainer.global_step in rows:
            rows[trainer.global_step].setdefault("valid rows", []).extend(row_hashes(batch))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* of another order than the checkpoint's")
        _, trace = fit(
            run,
            callback(on_train_batch_start=record_rows, on_validation_batch_start=record_validation),
        )
    return {
        step: {
            **rows[step],
            "loss": values["loss"],
            "lr": max(values["lr"]),
            "grad_norm": values["grad_norm"],
        }
        for step, values in trace.steps.items()
    }


def merge_ranks(run: Run, ranks: list[Steps]) -> dict[str, dict[str, Any]]:
    """Steps in the form of the JSON records, with the rows of each replica; all ranks must agree on other values."""
    tp = run.strategy.get("tp", 1)
    pp = run.strategy.get("pp", 1)
    replicas = ranks[: len(ranks) // pp : tp]  # first rank of the first stage of each
    steps: dict[str, dict[str, Any]] = {}
    for step, values in ranks[0].items():
        values = {name: value for name, value in values.items() if "rows" not in name}
        for other in ranks[1:]:
            assert {name: other[step][name] for name in values} == values, (
                f"ranks differ in step {step}"
            )
        steps[str(step)] = {
            **values,
            "rows": [" ".join(replica[step]["rows"]) for replica in replicas],
        }
    return steps


def row_hashes(batch: Mapping[str, Any]) -> list[str]:
    """Hash of each row over all of its keys."""
    rows = [hashlib.sha256() for _ in next(iter(batch.values()))]
    for key in sorted(batch):
        for digest, row in zip(rows, batch[key], strict=True):
            digest.update(key.encode() + plain_bytes(row))
    return [digest.hexdigest()[:8] for digest in rows]


def plain_bytes(tensor: Any) -> bytes:
    """Shape and values, independent of the integer dtype."""
    tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
    return str(tuple(tensor.shape)).encode() + bytes(tensor.contiguous().numpy().tobytes())


def _absolute(files: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(files, item) for item in value]
    return str(files / value) if isinstance(value, str) else value


# ---- outputs of commands: exports, datasets, texts and sample orders --------------------------------------------

Tensors = dict[str, str]
"""Shape, dtype and hash of the content by name."""

DATASETS = {
    "books": "--tokenizer {} --append-eod --json-keys text title",
    "web": "--tokenizer {} --append-eod",
    "books_pieces": "--tokenizer {} --split-sentences",
    "books_words": "--tokenizer {} --split-sentences",
}
"""Options of ``preprocess`` by dataset prefix, which begins with the name of the corpus."""
PROMPTS = ("the new man of", "who are you")
TEXTS = {
    "greedy": "--max-new-tokens 8",
    "beams": "--num-beams 3 --length-penalty 1.5 --num-return-sequences 2 --max-new-tokens 6",
    "drawn": "--temperature 1.5 --top-p 0.9 --top-p-decay 0.95 --seed 3 --max-new-tokens 8",
}
"""Options of ``generate``."""


def command(line: str, *values: object) -> str:
    """Run a command as a single process and return its output.

    Args:
        line: The words of the command; each ``{}`` is replaced by the next value.
        values: Replacements of ``{}``, and further words.
    """
    rest = iter(values)
    words = [str(next(rest)) if word == "{}" else word for word in line.split()]
    ((code, out, err),) = run_here(".", [[*words, *map(str, rest)]])
    assert code == 0, f"{line}: {err}"
    return out


def make_datasets(files: Path, work: Path) -> None:
    """Write indexed datasets of the corpora in ``files``, and two of them merged."""
    for name, options in DATASETS.items():
        corpus = name.split("_")[0]
        tokenizer = "pieces" if name == "books_pieces" else "words"
        line = f"preprocess --input {{}} --output-prefix {{}} {options}"
        command(line, files / f"{corpus}.jsonl", work / name, files / tokenizer)
    parts = (work / f"{name}_text_document" for name in ("books", "web"))
    command("merge --output-prefix {} --input", work / "merged", *parts)


def samples(files: Path, work: Path) -> dict[str, Any]:
    """Row hashes of each of ``SAMPLES`` in order."""
    return {
        name: {
            str(step): {key: " ".join(rows) for key, rows in values.items() if "rows" in key}
            for step, values in train(run, files, work).items()
        }
        for name, run in SAMPLES.items()
    }


def exports(checkpoints: Path, work: Path) -> dict[str, Any]:
    """Export each checkpoint to each format."""
    kinds = (hugging_face_export, legacy_export, legacy_import, megatron_export)
    return {
        path.name: {kind.__name__: kind(path, work) for kind in kinds}
        for path in sorted(checkpoints.iterdir())
    }


def hugging_face_export(path: Path, work: Path) -> dict[str, Any]:
    """Convert a checkpoint to a Hugging Face model directory."""
    from safetensors.torch import load_file

    target = work / f"{path.name}-hf"
    command("convert --to hf --load-path {} --save-path {}", path, target)
    tensors = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    known = {
        *next(model for model in MODELS.values() if model["model_type"] == config["model_type"]),
        "architectures",
    }
    return {
        "tensors": _describe(tensors),
        "config": {name: config[name] for name in sorted(known) if name in config},
    }


def legacy_export(path: Path, work: Path) -> dict[str, Any]:
    """Convert to Megatron-LM's files at tp=2, pp=2: the weights of each rank, and the arguments."""
    import torch

    target = work / f"{path.name}-legacy"
    layout = "--tp 2 --pp 2 --make-vocab-size-divisible-by 8"
    command(
        f"convert --to megatron-legacy {layout} --load-path {{}} --save-path {{}}", path, target
    )
    contents: dict[str, Any] = {}
    for file in sorted(target.rglob("model_optim_rng.pt")):
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, weights_only=True)
        arguments = {
            name: str(value)
            for name, value in vars(state["args"]).items()
            if name != "hugging_face_config"
        }
        plain = {
            "version": state["checkpoint_version"],
            "iteration": state["iteration"],
            "arguments": arguments,
        }
        contents |= {
            "of all ranks": plain,
            str(file.relative_to(target)): _describe(_flat(state["model"])),
        }
    return contents


def legacy_import(path: Path, work: Path) -> Tensors:
    """Convert the output of ``legacy_export`` to a model directory."""
    return hugging_face_export(work / f"{path.name}-legacy", work)["tensors"]  # type: ignore[no-any-return]


def megatron_export(path: Path, work: Path) -> Tensors:
    """Convert a checkpoint's weights to another ``*.ckpt``, read by torch's reader."""
    target = work / f"{path.name}-core.ckpt"
    line = "convert --to megatron --make-vocab-size-divisible-by 8 --load-path {} --save-path {}"
    command(line, path, target)
    weights = {
        name: tensor
        for name, tensor in read_tensors(target).items()
        if not name.startswith("optimizer.")
    }
    return _describe(weights)


def texts(path: Path) -> dict[str, list[str]]:
    """Completions by a checkpoint that contains a tokenizer and a generation config."""
    completions = {}
    for name, options in TEXTS.items():
        line = f"generate --accelerator cpu --json --checkpoint {{}} {options} --prompt"
        lines = command(line, path, *PROMPTS)
        completions[name] = [json.loads(line)["text"] for line in lines.splitlines()]
    return completions


def _describe(tensors: Mapping[str, Any]) -> Tensors:
    return {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {_hash(tensor)}"
        for name, tensor in sorted(tensors.items())
    }


def _hash(tensor: Any) -> str:
    return hashlib.sha256(plain_bytes(tensor)).hexdigest()[:12]


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, value in nested.items():
        tensors |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return tensors
