"""Count how often control enters another file of the package during a batch, a save and a generated token.

    python -m tests.hops           # the counts
    python -m tests.hops --list    # and each hop

A hop is a pair of package files: the first called a function of the second, directly or through Lightning, torch or
Megatron. A pair counts once, whatever the number of layers and microbatches. ``engine/cpu.py`` is not counted: it
replaces CUDA on machines without it, in every torch operation.

At 25d5a27: 53 from reading a batch to its loss, 48 in a save, 14 for each token after the first. Present limits, with
context parallelism, adapters, experts and heartbeats: tests/test_hops.py.
"""

import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

import lightning_megatron
from lightning_megatron import GPTTrainStep, IndexedDataModule, MegatronModule, MegatronStrategy
from tests.golden.runs import MODELS
from tests.models import QUIET

Hop = tuple[str, str]

_OURS = f"{Path(lightning_megatron.__file__).parent}/"
_EXCLUDED = ("engine/cpu.py",)
_FILES = Path(__file__).parent / "golden" / "files"


class Trace:
    """Records hops of this thread and of threads that it starts, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.hops: set[Hop] = set()

    def start(self) -> None:
        """Trace every call."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def stop(self) -> None:
        """Stop tracing."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or (entered := _file_of(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        calling = "" if caller is None else _file_of(caller)
        if calling != entered:
            self.hops.add((str(calling), entered))


def _file_of(frame: FrameType) -> str | None:
    """The frame's file relative to the package; None if it is outside or excluded."""
    path = frame.f_code.co_filename
    name = path[len(_OURS) :] if path.startswith(_OURS) else None
    return None if name in _EXCLUDED else name


def hops() -> dict[str, set[Hop]]:
    """Hops by activity, in one process with a tiny GPT-2; each is traced at its second run, after warm-up."""
    batch = Trace()
    save = Trace()
    first = Trace()
    token = Trace()

    class Step(GPTTrainStep):
        def loss_func(self, *arguments: Any) -> Any:
            loss = super().loss_func(*arguments)
            batch.stop()
            return loss

    class Module(MegatronModule):
        def on_train_batch_end(self, outputs: Any, data: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, data, batch_idx)
            if batch_idx == 1:
                save.start()
            self.trainer.save_checkpoint(f"{folder}/{batch_idx}.ckpt")
            save.stop()
            if batch_idx == 1:
                batch.start()

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=3,
            limit_val_batches=0,
            strategy=MegatronStrategy(),
            **QUIET,
        )
        data = IndexedDataModule(
            str(_FILES / "books_text_document"), split="1,0,0", seq_length=16, index_cache=folder
        )
        module = Module(model=MODELS["gpt2"], train_step=Step())
        trainer.fit(module, datamodule=data)

    def on_tokens(*_: object) -> None:
        is_first = sys.getprofile() == first._record
        (first if is_first else token).stop()
        if is_first:
            token.start()

    for _ in range(2):
        first.hops.clear()
        token.hops.clear()
        first.start()
        module.generate(
            torch.arange(4)[None],
            max_new_tokens=2,
            on_tokens=on_tokens,
        )
    return {
        "from a batch to its loss": batch.hops,
        "in a save": save.hops,
        "to the first token of a text": first.hops,
        "for the next token": token.hops,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for activity, pairs in hops().items():
        print(
            f"{len(pairs):3} hops {activity}, through {len({file for pair in pairs for file in pair})} files"
        )
        for calling, entered in sorted(pairs) if "--list" in sys.argv else ():
            print(f"      {calling or 'outside'} -> {entered}")
