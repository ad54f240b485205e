"""Count how often control enters another file of the package on its way through a batch, a save and a token.

    python -m tests.hops           # three numbers
    python -m tests.hops --list    # and each hop

A hop is a pair of files of ours: a function of the second was called while the first was the last of ours on the stack,
be it directly or through Lightning, torch or Megatron. A pair counts once, however many layers or microbatches take it.
``engine/cpu.py`` is left out: it stands in for CUDA on machines without it, at every operation of torch.

At 25d5a27: 53 from a batch to its loss, its reading included, 48 in a save, and 14 for each token after the first; at
most today: tests/test_hops.py, with context parallelism, adapters, experts and heartbeats.
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
_LEFT_OUT = ("engine/cpu.py",)
_FILES = Path(__file__).parent / "golden" / "files"


class Trace:
    """The hops of this thread, and of those that it starts, while it runs."""

    def __init__(self) -> None:
        self.hops: set[Hop] = set()

    def start(self) -> None:
        """Begin to look at every call."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def stop(self) -> None:
        """Look no more."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or (entered := _file_of(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        left = "" if caller is None else _file_of(caller)
        if left != entered:
            self.hops.add((str(left), entered))


def _file_of(frame: FrameType) -> str | None:
    """The file of a frame below the package; None if it is not ours."""
    path = frame.f_code.co_filename
    name = path[len(_OURS) :] if path.startswith(_OURS) else None
    return None if name in _LEFT_OUT else name


def hops() -> dict[str, set[Hop]]:
    """What there is to count, in one process with a tiny GPT-2; the second time of each, when everything is warm."""
    batch, save, first, token = Trace(), Trace(), Trace(), Trace()

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
            accelerator="cpu", devices=1, max_steps=3, limit_val_batches=0, strategy=MegatronStrategy(), **QUIET
        )
        data = IndexedDataModule(str(_FILES / "books_text_document"), split="1,0,0", seq_length=16, index_cache=folder)
        module = Module(model=MODELS["gpt2"], train_step=Step())
        trainer.fit(module, datamodule=data)

    def on_tokens(*_: object) -> None:
        is_first = sys.getprofile() == first._see
        (first if is_first else token).stop()
        if is_first:
            token.start()

    for _ in range(2):
        first.hops.clear()
        token.hops.clear()
        first.start()
        module.generate(torch.arange(4)[None], max_new_tokens=2, on_tokens=on_tokens)
    return {
        "from a batch to its loss": batch.hops,
        "in a save": save.hops,
        "to the first token of a text": first.hops,
        "for the next token": token.hops,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for what, found in hops().items():
        print(f"{len(found):3} hops {what}, through {len({file for hop in found for file in hop})} files")
        for left, entered in sorted(found) if "--list" in sys.argv else ():
            print(f"      {left or 'outside'} -> {entered}")
