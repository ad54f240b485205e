"""Losses in bf16 and in fp8 on real text: what the noise of seeds is, and whether fp8 stays within it.

The text is that of Python packages and of the system's documentation, wherever this runs: every ``.py``, ``.rst``,
``.md`` and ``.txt`` file once, in an order of its own (by hash), read as tokens of a byte-level BPE trained on its
beginning. Another seed is another set of initial weights and another order of rows. One JSON file with all losses, and
one picture.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
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
from lightning_megatron import LRSchedule, MegatronModule, MegatronStrategy
from lightning_megatron.engine.fillers import fp8

PLACES = [Path(sysconfig.get_path("purelib")), Path("/usr/share/doc")]
SUFFIXES = (".py", ".rst", ".md", ".txt")
VOCAB_SIZE = 32_000
_TRAINED_ON = 8_000_000
"""Bytes at the beginning of the text that the tokenizer learns from."""
_MEAN_OF = 50
"""Steps that one point of the curve, and one figure of the table, is the mean of."""


class Way(NamedTuple):
    """One run: its name is its key in ``WAYS``."""

    fp8: fp8.Recipe | None = None
    fast_backward: bool = True
    seed: int = 1


WAYS = {
    "bf16": Way(),
    "bf16, seed 2": Way(seed=2),
    "fp8": Way("tensorwise"),
    "fp8, exact backward": Way("tensorwise", fast_backward=False),
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The tokens in rows of ``length``, one after the other."""

    def __init__(self, tokens: np.ndarray[Any, Any], length: int) -> None:
        self._rows = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self._rows[index].astype(np.int64))}


class Losses(pl.Callback):
    """Keeps the loss of every step on the device, so that nothing waits."""

    def __init__(self) -> None:
        self.of_steps: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of_steps.append(outputs["loss"].detach())


def text_below(folders: Sequence[Path], megabytes: float) -> list[str]:
    """Different files, in an order that has nothing to do with their places, until they are so many megabytes."""
    found = {path for folder in folders for suffix in SUFFIXES for path in folder.rglob(f"*{suffix}")}
    ordered = sorted(found, key=lambda path: hashlib.sha256(str(path).encode()).digest())
    texts: dict[bytes, str] = {}
    size = 0
    for path in ordered:
        if size >= megabytes * 1e6:
            break
        if path.is_file() and (content := path.read_bytes()):
            digest = hashlib.sha256(content).digest()
            size += 0 if digest in texts else len(content)
            texts.setdefault(digest, content.decode(errors="replace"))
    return list(texts.values())


def tokens_of(texts: Sequence[str], vocab_size: int) -> np.ndarray[Any, Any]:
    """All texts as one row of tokens, each with an end."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    sizes = np.cumsum([len(text) for text in texts])
    beginning = texts[: 1 + int(np.searchsorted(sizes, _TRAINED_ON))]
    tokenizer.train_from_iterator(beginning, vocab_size, special_tokens=["<end>"], show_progress=False)
    encoded = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.array([*each.ids, 0], dtype=np.uint16) for each in encoded])


def run(case: Case, way: Way, tokens: np.ndarray[Any, Any], steps: int, lr: float) -> list[float]:
    """The loss of each step."""
    fp8.FAST_BACKWARD = way.fast_backward
    pl.seed_everything(way.seed, verbose=False)
    module = MegatronModule(
        model=dict(case.model), lr=lr, lr_schedule=LRSchedule(style="cosine", warmup_fraction=0.05, min_lr=lr / 10)
    )
    losses = Losses()
    trainer = pl.Trainer(
        strategy=MegatronStrategy(num_microbatches=case.num_microbatches, fp8=way.fp8, **case.layout),
        accelerator=case.accelerator,
        devices=case.num_devices,
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    order = torch.Generator().manual_seed(way.seed)
    rows = Rows(tokens, case.seq_length)
    trainer.fit(module, DataLoader(rows, batch_size=case.rows, shuffle=True, generator=order, drop_last=True))
    found: list[float] = torch.stack(losses.of_steps).tolist()
    del trainer, module
    gc.collect()
    return found


def table(curves: dict[str, list[float]]) -> str:
    """The mean loss of the last steps, and how far from that of the first run."""
    last = {name: float(np.mean(losses[-_MEAN_OF:])) for name, losses in curves.items()}
    first = next(iter(last.values()))
    rows = (f"| {name} | {loss:.4f} | {loss - first:+.4f} |" for name, loss in last.items())
    return "\n".join([f"| run | loss, mean of the last {_MEAN_OF} steps | apart |", "|---|---|---|", *rows])


def draw(curves: dict[str, list[float]], file: Path) -> None:
    """Above the losses, below how far each is from the first run's, as means of neighbouring steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    means = {
        name: np.convolve(losses, np.ones(_MEAN_OF) / _MEAN_OF, mode="valid")
        for name, losses in curves.items()
        if len(losses) >= _MEAN_OF
    }
    first = next(iter(means.values()), None)
    for name, mean in means.items():
        above.plot(mean, label=name)
        below.plot(mean - first, label=name)
    above.set_ylabel("loss")
    below.set_ylabel("apart from the first")
    below.set_xlabel(f"step (mean of {_MEAN_OF})")
    above.legend()
    figure.savefig(file, dpi=80)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    options = _parser().parse_args(arguments)
    case = changed(case_named(options.case), options.layers, options.micro_batch_size, options.num_microbatches)
    layout = {name: value for name, value in case.layout.items() if name != "fp8"}
    case = replace(
        case,
        layout=layout,
        model={**case.model, "vocab_size": options.vocab_size},
        seq_length=options.seq_length or case.seq_length,
    )
    texts = text_below(options.text or PLACES, options.megabytes)
    tokens = tokens_of(texts, options.vocab_size)
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
    for name in options.way or WAYS:
        curves[name] = run(case, WAYS[name], tokens, options.steps, options.lr)
        if is_first_rank():
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({**header, "losses": curves}) + "\n")
            print(table(curves), flush=True)
            draw(curves, options.output.with_suffix(".png"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__, allow_abbrev=False)
    parser.add_argument("--case", choices=[case.name for case in CASES], default="llama-1b", help="model and layout")
    parser.add_argument("--layers", type=int, help="fewer layers than the case has")
    parser.add_argument("--seq-length", type=int, help="instead of the case's")
    parser.add_argument("--micro-batch-size", type=int, help="instead of the case's")
    parser.add_argument("--num-microbatches", type=int, help="instead of the case's")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="of the tokenizer that is trained")
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--lr", type=float, default=3e-4, help="at the peak of a cosine with 5 %% of warm-up")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="what to run, in turn; default: all")
    parser.add_argument("--text", type=Path, action="append", help=f"folders with text; default: {PLACES}")
    parser.add_argument("--megabytes", type=float, default=60.0, help="of text, at most")
    parser.add_argument(
        "--output", type=Path, default=Path("convergence.json"), help="losses; the picture is beside it"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
