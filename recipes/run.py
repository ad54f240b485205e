"""Run recipes from end to end: text, tokenizer, dataset, training, export; figures as JSON and the loss curve as PNG.

    python -m recipes.run bert t5 packed_chats                  # two cores are enough
    python -m recipes.run gpt2_small llama_1b_fp8 lora_llama_8b experts_8_layers --output results
    python -m recipes.run bert --tiny                           # each step with a tiny model, on a CPU

Each step is a command of ``lightning-megatron`` that is printed and can be typed alone; its output goes to a log file.
What exists in ``--work`` is used again, except that a recipe trains anew. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from recipes import text as text_module

ROOT = Path(__file__).parent.parent
WORK = Path("runs/recipes")
"""Where the configurations expect text, tokenizers and datasets."""
SHAKESPEARE = Path("examples/data/shakespeare.jsonl.gz")
PACKAGES = ("lightning-megatron", "torch", "lightning", "megatron-core", "transformers")

_PACKAGES_MEGABYTES = 60.0

Kind = Literal["gpt", "bert", "t5"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe needs besides its configuration ``recipes/NAME.yaml``."""

    base: str
    """Configuration in configs/ that recipes/NAME.yaml changes; empty if it stands alone."""
    text: Literal["packages", "shakespeare", "chats"]
    """What the model learns."""
    kind: Kind = "gpt"
    """Kind of tokenizer and samples."""
    vocab_size: int
    """Vocabulary size of the tokenizer; the model's may be larger."""
    megabytes: float = _PACKAGES_MEGABYTES
    """Size of the text, unless it is Shakespeare's."""
    export_format: Literal["hf", "peft"] = "hf"
    """What ``convert`` makes of the checkpoint."""
    prompt: str = ""
    """What the exported model continues or fills; empty for an export that is no whole model."""
    tiny: Mapping[str, Any]
    """Fields of the model's config with ``--tiny``."""


_TINY_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
_TINY_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_TINY_EXPERTS = {
    **_TINY_LLAMA,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_TINY_BERT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_TINY_T5 = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
}
_TINY_VOCAB_SIZE = 512

RECIPES = {
    "gpt2_small": Recipe(
        base="gpt2_small",
        text="packages",
        vocab_size=32_000,
        prompt="def read_lines(path):\n",
        tiny=_TINY_GPT2,
    ),
    "llama_1b_fp8": Recipe(
        base="llama_1b",
        text="packages",
        vocab_size=32_000,
        prompt="def read_lines(path):\n",
        tiny=_TINY_LLAMA,
    ),
    "lora_llama_8b": Recipe(
        base="lora_llama",
        text="chats",
        vocab_size=32_000,
        megabytes=20.0,
        export_format="peft",
        tiny=_TINY_LLAMA,
    ),
    "experts_8_layers": Recipe(
        base="",
        text="packages",
        vocab_size=32_000,
        prompt="def read_lines(path):\n",
        tiny=_TINY_EXPERTS,
    ),
    "bert": Recipe(
        base="pretrain_bert",
        text="shakespeare",
        kind="bert",
        vocab_size=4096,
        prompt="My lord, I [MASK] not what you say.",
        tiny=_TINY_BERT,
    ),
    "t5": Recipe(
        base="pretrain_t5",
        text="shakespeare",
        kind="t5",
        vocab_size=4096,
        prompt="My lord, I <extra_id_0> you say.",
        tiny=_TINY_T5,
    ),
    "packed_chats": Recipe(
        base="finetune_llama",
        text="chats",
        vocab_size=4096,
        megabytes=2.0,
        prompt="User: What does read_lines do?\nAssistant:",
        tiny=_TINY_LLAMA,
    ),
}
"""Recipes by name."""


class CommandError(RuntimeError):
    """A command of a recipe failed."""


class Run:
    """One recipe: the commands that were run, and where its files are."""

    def __init__(self, name: str, work: Path, output: Path, tiny: bool) -> None:
        self.name = name
        self.recipe = RECIPES[name]
        self.work = work
        self.output = output
        self.is_tiny = tiny
        self.folder = work / name
        self.log = output / f"{name}.log"
        self.commands: list[dict[str, Any]] = []

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return _TINY_VOCAB_SIZE if self.is_tiny else self.recipe.vocab_size

    def command(self, *words: object) -> float:
        """Run a command of ``lightning-megatron``, and return its seconds.

        Raises:
            CommandError: If it fails, with the end of its output.
        """
        typed = [str(word) for word in words]
        shown = shlex.join(["lightning-megatron", *typed])
        print(f"{self.name}: {shown}", flush=True)
        start = time.monotonic()
        code = execute(typed, self.log)
        seconds = time.monotonic() - start
        if code:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise CommandError(f"{end}\n{shown}: exit code {code}; its output is in {self.log}")
        print(f"{self.name}: done in {seconds:.0f} s", flush=True)
        self.commands.append({"command": shown, "seconds": round(seconds, 1)})
        return seconds

    def make(self, made: Path, *words: object) -> None:
        """Run a command of ``lightning-megatron``, unless another recipe has made what it makes."""
        if made.exists():
            shown = shlex.join(["lightning-megatron", *(str(word) for word in words)])
            self.commands.append({"command": shown, "seconds": None})
        else:
            self.command(*words)

    def collect(self, kind: str, folder: Path, megabytes: float) -> None:
        """Collect text, unless another recipe has."""
        words = [kind, "--output", str(folder), "--megabytes", str(megabytes)]
        shown = shlex.join(["python", "-m", "recipes.text", *words])
        start = time.monotonic()
        is_new = not folder.exists()
        if is_new:
            text_module.main(words)
        seconds = round(time.monotonic() - start, 1) if is_new else None
        if shown not in [each["command"] for each in self.commands]:
            self.commands.append({"command": shown, "seconds": seconds})

    def run(self, note: str = "") -> dict[str, Any]:
        """Run all steps; returns the figures, with the note."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.output.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        text = self.collect_text()
        tokenizer = self.train_tokenizer()
        data_path = text if self.recipe.text == "chats" else self.preprocess(text, tokenizer)
        seconds = self.command("fit", *self.configurations(data_path, tokenizer))
        figures = {
            "recipe": self.name,
            "tiny": self.is_tiny,
            "machine": machine(),
            "note": note,
            "packages": {package: importlib.metadata.version(package) for package in PACKAGES},
            "text_bytes": _size(text),
            "fit_seconds": round(seconds, 1),
            **training_figures(self.metrics()),
            "export": self.export(tokenizer),
            "commands": self.commands,
        }
        (curve,) = self.folder.rglob("loss_curve.png")
        shutil.copy(curve, self.output / f"{self.name}.png")
        file = self.output / f"{self.name}.json"
        file.write_text(json.dumps(figures, indent=2) + "\n")
        print(f"{self.name}: figures in {file}, curve in {file.with_suffix('.png')}", flush=True)
        return figures

    def collect_text(self) -> Path:
        """Return the text: a file, or a folder of JSON lines."""
        if self.recipe.text == "shakespeare":
            return SHAKESPEARE if self.work == WORK else ROOT / SHAKESPEARE
        folder = self.work / "text" / self.recipe.text
        megabytes = 0.3 if self.is_tiny else self.recipe.megabytes
        if self.recipe.text == "chats":
            folder = folder.with_name(f"chats-{self.recipe.megabytes:.0f}MB")
        self.collect(self.recipe.text, folder, megabytes)
        return folder

    def train_tokenizer(self) -> Path:
        """Return the directory of a tokenizer trained on the first file of text, with a chat template."""
        folder = self.work / "tokenizers" / f"{self.recipe.kind}-{self.vocab_size}"
        text = ROOT / SHAKESPEARE
        if self.recipe.kind == "gpt":
            packages = self.work / "text" / "packages"
            self.collect("packages", packages, 0.3 if self.is_tiny else _PACKAGES_MEGABYTES)
            text = packages / "000.jsonl"
        elif self.work == WORK:
            text = SHAKESPEARE
        template = folder / "chat_template.jinja"
        self.make(
            folder,
            "train-tokenizer",
            "--kind",
            self.recipe.kind,
            "--input",
            text,
            "--vocab-size",
            self.vocab_size,
            "--output",
            folder,
        )
        if self.recipe.kind == "gpt":
            shutil.copy(ROOT / "recipes" / template.name, template)
        return folder

    def preprocess(self, text: Path, tokenizer: Path) -> Path:
        """Return the path, without .bin, of the text as an indexed dataset."""
        prefix = self.work / "data" / f"{self.recipe.text}-{tokenizer.name}"
        form = "document" if self.recipe.kind == "gpt" else "sentence"
        dataset = prefix.with_name(f"{prefix.name}_text_{form}")
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self.make(
            dataset.with_suffix(".idx"),
            "preprocess",
            "--input",
            text,
            "--tokenizer",
            tokenizer,
            "--output-prefix",
            prefix,
            "--append-eod" if self.recipe.kind == "gpt" else "--split-sentences",
            "--workers",
            1 if self.is_tiny else os.cpu_count() or 1,
        )
        return dataset

    def configurations(self, data_path: Path, tokenizer: Path) -> list[str]:
        """Arguments of ``fit``: the base, the recipe, and a file with what differs from both."""
        files = [f"recipes/{self.name}.yaml"]
        if self.recipe.base:
            files.insert(0, f"configs/{self.recipe.base}.yaml")
        if self.work != WORK:
            files = [str(ROOT / file) for file in files]
        changes: dict[str, Any] = {}
        if self.work != WORK or self.is_tiny:
            changes = {
                "trainer": {"logger": {"init_args": {"save_dir": str(self.folder)}}},
                "data": {"init_args": {"data_path": str(data_path)}},
            }
            if self.recipe.kind != "gpt" or self.recipe.text == "chats":
                changes["data"]["init_args"]["tokenizer"] = str(tokenizer)
        if self.is_tiny:
            self._shrink(changes)
        if changes:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / "changes.yaml"
            file.write_text(yaml.safe_dump(changes))
            files.append(str(file))
        return [word for file in files for word in ("--config", file)]

    def _shrink(self, changes: dict[str, Any]) -> None:
        """Add a tiny model, one process on a CPU and four steps."""
        changes["trainer"] |= {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "val_check_interval": 2,
            "limit_val_batches": 1,
            "strategy": {
                "init_args": {
                    "tp": 1,
                    "pp": 1,
                    "num_microbatches": 1,
                    "sequence_parallel": False,
                }
            },
        }
        model = {**self._model(), **self.recipe.tiny, "vocab_size": self.vocab_size}
        changes["model"] = {"init_args": {"model": model, "lr_schedule": {"warmup_steps": 1}}}
        changes["data"]["init_args"] |= {
            "split": "90,10,0",
            "seq_length": 64,
            "micro_batch_size": 2,
            "num_workers": 0,
        }

    def _model(self) -> dict[str, Any]:
        """Fields of the model's config, of which a later configuration replaces all."""
        for file in (f"recipes/{self.name}.yaml", f"configs/{self.recipe.base}.yaml"):
            fields = yaml.safe_load((ROOT / file).read_text())["model"]["init_args"]
            if "model" in fields:
                return dict(fields["model"])
        raise AssertionError(f"recipes/{self.name}.yaml and its base have no model")

    def metrics(self) -> list[dict[str, str]]:
        """Rows of the CSV logger's file."""
        (file,) = self.folder.rglob("metrics.csv")
        with file.open() as lines:
            return list(csv.DictReader(lines))

    def export(self, tokenizer: Path) -> dict[str, Any]:
        """Convert the checkpoint to Hugging Face, let transformers use it, and return what came out."""
        (checkpoint,) = self.folder.rglob("*.ckpt")
        folder = self.folder / "model"
        options = ["--to", self.recipe.export_format, "--tokenizer", tokenizer]
        if not self.is_tiny and machine()["gpus"]:
            options += ["--dtype", "bf16"]
        self.command("convert", "--load-path", checkpoint, "--save-path", folder, *options)
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        exported = {"files": files, "parameters": num_parameters(folder)}
        if self.recipe.prompt:
            exported["prompt"] = self.recipe.prompt
            exported["completion"] = complete(
                folder.resolve(), self.recipe.kind, self.recipe.prompt
            )
        return exported


def execute(words: Sequence[str], log: Path) -> int:
    """Run ``lightning-megatron`` in a process of its own, its output at the end of a file; returns the exit code."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with log.open("a") as file:
        return subprocess.run(
            [sys.executable, "-m", "lightning_megatron", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        ).returncode


def training_figures(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Losses and speed of a run from the rows of its ``metrics.csv``."""
    losses = _column(rows, "train_loss")
    validation = _column(rows, "val_loss")
    figures: dict[str, Any] = {
        "steps": 1 + max(int(row["step"]) for row in rows if row.get("train_loss")),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "mean_loss_of_last_10_logged": statistics.mean(losses[-10:]),
        "val_losses": validation,
    }
    for name in ("tokens_per_s", "step_seconds", "mfu"):
        if values := _column(rows, name):
            figures[name] = statistics.median(values)
    if values := _column(rows, "peak_memory_gib"):
        figures["peak_memory_gib"] = max(values)
    per_step = [
        float(row["tokens_per_s"]) * float(row["step_seconds_mean"])
        for row in rows
        if row.get("tokens_per_s")
    ]
    if per_step:
        figures["tokens_per_step"] = round(statistics.median(per_step))
    return figures


def _column(rows: Sequence[Mapping[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def num_parameters(folder: Path) -> int:
    """Count the elements of all tensors in the safetensors files of a folder."""
    from safetensors import safe_open

    total = 0
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def complete(folder: Path, kind: Kind, prompt: str) -> str:
    """What transformers makes of a prompt, in a process that gives its memory of a GPU back."""
    return subprocess.run(
        [sys.executable, "-m", "recipes.complete", str(folder), "--kind", kind, "--prompt", prompt],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout.removesuffix("\n")


def machine() -> dict[str, Any]:
    """What the recipe runs on."""
    names = []
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=False).stdout.split(
            "\n"
        )
        names = [name for name in names if name]
    return {"gpus": names, "cores": os.cpu_count(), "python": platform.python_version()}


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run recipes from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="+", choices=RECIPES, metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument(
        "--output", type=Path, default=WORK / "results", help="folder for figures, curves and logs"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help=f"folder for text, datasets, checkpoints and models (default: {WORK})",
    )
    parser.add_argument("--note", default="", help="a sentence for the page, e.g. what else ran")
    parser.add_argument(
        "--tiny", action="store_true", help="four steps with a tiny model on a CPU, to try it out"
    )
    options = parser.parse_args(arguments)
    work = options.work or (WORK / "tiny" if options.tiny else WORK)
    failed = []
    for name in options.name:
        try:
            Run(name, work, options.output, options.tiny).run(options.note)
        except (CommandError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
