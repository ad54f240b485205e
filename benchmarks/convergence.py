"""Convergence benchmark: losses of bf16 and fp8, or of AdamW and Muon, on real text, beside the noise between seeds.

The text is the source code and documentation that this machine has: every distinct ``.py``, ``.rst``, ``.md`` and
``.txt`` file, ordered by hash, tokenized by a byte-level BPE that is trained on its beginning. A seed sets the initial
weights and the order of rows. Writes a JSON file with all losses, and a plot.
"""

from __future__ import annotations

import argparse
import gc
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.cases import CASES, Case, case_named, changed
from benchmarks.measurement import is_first_rank
from lightning_megatron import LRSchedule, MegatronModule, MegatronStrategy, OptimizerOptions
from lightning_megatron.engine.ops import fp8 as fp8_op
from lightning_megatron.engine.settings import Recipe
from recipes.text import read_texts

TEXT_FOLDERS = [Path(sysconfig.get_path("purelib")), Path("/usr/share/doc")]
VOCAB_SIZE = 32_000
_TOKENIZER_TEXT = 8_000_000
"""Characters at the beginning of the text that the tokenizer is trained on."""
_WINDOW = 50
"""Steps of the moving average in the plot and of the mean in the table."""


class Way(NamedTuple):
    """Options of a training run."""

    fp8: Recipe | None = None
    fast_backward: bool = True
    seed: int = 1
    optimizer: OptimizerOptions = OptimizerOptions()
    lr_mult: float = 1.0
    """Factor of ``--lr``."""


_ADAMW = OptimizerOptions(weight_decay=0.1)
_MUON = OptimizerOptions(name="muon", adjust_lr="match_rms_adamw")
WAYS = {
    "bf16": Way(),
    "bf16, seed 2": Way(seed=2),
    "fp8": Way("tensorwise"),
    "fp8, exact backward": Way("tensorwise", fast_backward=False),
    "adamw": Way(optimizer=_ADAMW),
    "adamw, 2 lr": Way(optimizer=_ADAMW, lr_mult=2.0),
    "adamw, 1/2 lr": Way(optimizer=_ADAMW, lr_mult=0.5),
    "adamw, 1/4 lr": Way(optimizer=_ADAMW, lr_mult=0.25),
    "adamw, seed 2": Way(optimizer=_ADAMW, seed=2),
    "muon": Way(optimizer=_MUON),
    "muon, 2 lr": Way(optimizer=_MUON, lr_mult=2.0),
    "muon, seed 2": Way(optimizer=_MUON, seed=2),
    "muon, 2 lr, seed 2": Way(optimizer=_MUON, lr_mult=2.0, seed=2),
}
DEFAULT_WAYS = ("bf16", "bf16, seed 2", "fp8", "fp8, exact backward")
"""Those that run unless ``--way`` chooses others."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive rows of ``length`` tokens."""

    def __init__(self, tokens: np.ndarray[Any, Any], length: int) -> None:
        self._rows = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self._rows[index].astype(np.int64))}


class Losses(pl.Callback):
    """Records the loss of every step on the device, without synchronization."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach())


def tokenize(texts: Sequence[str], vocab_size: int) -> np.ndarray[Any, Any]:
    """Train a tokenizer, and return the tokens of all texts, each followed by an end token."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    sizes = np.cumsum([len(text) for text in texts])
    beginning = texts[: 1 + int(np.searchsorted(sizes, _TOKENIZER_TEXT))]
    tokenizer.train_from_iterator(
        beginning, vocab_size, special_tokens=["<end>"], show_progress=False
    )
    encodings = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.array([*encoding.ids, 0], dtype=np.uint16) for encoding in encodings])


def run(case: Case, way: Way, tokens: np.ndarray[Any, Any], steps: int, lr: float) -> list[float]:
    """Train, and return the loss of each step."""
    fp8_op.FAST_BACKWARD = way.fast_backward
    pl.seed_everything(way.seed, verbose=False)
    lr *= way.lr_mult
    module = MegatronModule(
        model=dict(case.model),
        lr=lr,
        optimizer=way.optimizer,
        lr_schedule=LRSchedule(style="cosine", warmup_fraction=0.05, min_lr=lr / 10),
    )
    recorder = Losses()
    trainer = pl.Trainer(
        strategy=MegatronStrategy(
            num_microbatches=case.num_microbatches, fp8=way.fp8, **case.layout
        ),
        accelerator=case.accelerator,
        devices=case.num_devices,
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    order = torch.Generator().manual_seed(way.seed)
    rows = Rows(tokens, case.seq_length)
    trainer.fit(
        module,
        DataLoader(rows, batch_size=case.rows, shuffle=True, generator=order, drop_last=True),
    )
    losses: list[float] = torch.stack(recorder.losses).tolist()
    del trainer, module
    gc.collect()
    return losses


def table(curves: dict[str, list[float]]) -> str:
    """Format the mean loss of the last steps of each run, and its difference to the first run."""
    last = {name: float(np.mean(losses[-_WINDOW:])) for name, losses in curves.items()}
    first = next(iter(last.values()))
    rows = (f"| {name} | {loss:.4f} | {loss - first:+.4f} |" for name, loss in last.items())
    return "\n".join(
        [f"| run | loss, mean of the last {_WINDOW} steps | difference |", "|---|---|---|", *rows]
    )


def draw(curves: dict[str, list[float]], file: Path) -> None:
    """Plot moving averages of the losses, and below their differences to the first run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    means = {
        name: np.convolve(losses, np.ones(_WINDOW) / _WINDOW, mode="valid")
        for name, losses in curves.items()
        if len(losses) >= _WINDOW
    }
    first = next(iter(means.values()), np.empty(0))
    for name, mean in means.items():
        above.plot(mean, label=name)
        below.plot(mean - first, label=name)
    above.set_ylabel("loss")
    below.set_ylabel("difference to the first run")
    below.set_xlabel(f"step (mean of {_WINDOW})")
    above.legend()
    figure.savefig(file, dpi=80)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    case = changed(
        case_named(options.case), options.layers, options.micro_batch_size, options.num_microbatches
    )
    layout = {name: value for name, value in case.layout.items() if name != "fp8"}
    case = replace(
        case,
        layout=layout,
        model={**case.model, "vocab_size": options.vocab_size},
        seq_length=options.seq_length or case.seq_length,
    )
    texts = read_texts(options.text or TEXT_FOLDERS, options.megabytes)
    tokens = tokenize(texts, options.vocab_size)
    size = sum(len(text.encode()) for text in texts) / 1e6
    header = {
        "case": str(case),
        "layers": options.layers,
        "files": len(texts),
        "megabytes": size,
        "tokens": len(tokens),
    }
    if is_first_rank():
        print(header, flush=True)
    curves = {}
    for name in options.way or DEFAULT_WAYS:
        curves[name] = run(case, WAYS[name], tokens, options.steps, options.lr)
        if is_first_rank():
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({**header, "losses": curves}) + "\n")
            print(table(curves), flush=True)
            draw(curves, options.output.with_suffix(".png"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--case", choices=[case.name for case in CASES], default="llama-1b", help="model and layout"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: the case's)")
    parser.add_argument("--seq-length", type=int, help="(default: the case's)")
    parser.add_argument("--micro-batch-size", type=int, help="(default: the case's)")
    parser.add_argument("--num-microbatches", type=int, help="(default: the case's)")
    parser.add_argument(
        "--vocab-size", type=int, default=VOCAB_SIZE, help="vocabulary size of the tokenizer"
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps per run")
    parser.add_argument(
        "--lr", type=float, default=3e-4, help="peak of a cosine schedule with 5 %% warm-up"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=list(WAYS),
        help="run; may be repeated (default: those of bf16 and fp8)",
    )
    parser.add_argument(
        "--text", type=Path, action="append", help=f"directory with text (default: {TEXT_FOLDERS})"
    )
    parser.add_argument("--megabytes", type=float, default=60.0, help="maximum size of the text")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("convergence.json"),
        help="losses; the plot is next to it",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
