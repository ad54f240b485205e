"""Instructions and datasets reach every layout as they reach one rank, and over an interruption."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.corpus import VOCAB_SIZE, make_corpus
from tests.ranks import run_ranks

NUM_ITEMS = 22
LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class Run:
    """What each rank does."""

    kind: str
    data: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=lambda: {"num_microbatches": 2})
    max_steps: int = 6
    checkpoint: Path | None = None
    saved_to: Path | None = None
    saved_after: int | None = None


class Numbered(torch.utils.data.Dataset[dict[str, Any]]):
    """Each item begins with its number."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index, *((index * 7 + place) % 50 for place in range(LENGTH - 1))]}


def _run(run: Run) -> list[dict[str, Any]]:
    """Train; each step's loss and rows."""
    import os

    import lightning.pytorch as pl

    from lightning_megatron import DatasetDataModule, InstructionDataModule, MegatronModule, MegatronStrategy

    steps: list[dict[str, Any]] = []

    class Watching(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            steps.append({"loss": float(loss), "rows": batch["input_ids"].tolist()})
            return loss

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == run.saved_after:
                trainer.save_checkpoint(run.saved_to)

    pl.seed_everything(3, verbose=False)
    classes = {"instructions": InstructionDataModule, "dataset": DatasetDataModule}
    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB_SIZE}
    no_dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    module = Watching(model={"model_type": "gpt2", **shape, **no_dropout}, lr=1e-2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MegatronStrategy(**run.layout),
        max_steps=run.max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        callbacks=[Saving()],
    )
    trainer.fit(module, datamodule=classes[run.kind](micro_batch_size=2, **run.data), ckpt_path=run.checkpoint)
    return steps


def _steps(run: Run, world_size: int) -> list[list[dict[str, Any]]]:
    results: list[list[dict[str, Any]]] = run_ranks(_run, world_size, run)
    return results


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of InstructionDataModule."""
    folder = tmp_path_factory.mktemp("instructions")
    make_corpus(folder)
    records = [{"prompt": f"w{n} w{n + 1} ", "completion": " ".join(["w3"] * (1 + n % 4))} for n in range(30)]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return {
        "data_path": str(folder / "pairs.jsonl"),
        "tokenizer": str(folder / "tok"),
        "split": "8,2",
        "seq_length": 32,
    }


@pytest.mark.parametrize("rows", [{"packing": True}, {"pad_to_multiple_of": 4}], ids=str)
def test_instructions_teach_every_layout_the_same(instructions: dict[str, Any], rows: dict[str, Any]) -> None:
    run = Run(kind="instructions", data={**instructions, **rows})
    (alone,) = _steps(run, 1)
    assert alone[-1]["loss"] < alone[0]["loss"]

    for steps in _steps(replace(run, layout={"tp": 2, "pp": 2, "sequence_parallel": True, "num_microbatches": 2}), 4):
        assert [step["rows"] for step in steps] == [step["rows"] for step in alone]
        # The same sums in another order, in fp32.
        assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in alone], rel=1e-5)


def test_rows_that_sequence_parallelism_cannot_split_are_refused(instructions: dict[str, Any]) -> None:
    run = Run(kind="instructions", data={**instructions, "seq_length": 30, "pad_to_multiple_of": 3})

    with pytest.raises(Exception, match=r"pad_to_multiple_of=3 is not a multiple of tp=2"):
        _steps(replace(run, layout={"tp": 2, "sequence_parallel": True}), 2)


def _hugging_face_dataset(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    source = Numbered()
    columns = {"input_ids": [source[index]["input_ids"] for index in range(NUM_ITEMS)]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("source", [pytest.param("torch", marks=pytest.mark.exhaustive), "hugging_face"])
def test_each_pass_takes_every_item_once_over_interruptions_at_other_layouts(source: str, tmp_path: Path) -> None:
    train = Numbered() if source == "torch" else _hugging_face_dataset(tmp_path)
    run = Run(kind="dataset", data={"train": train}, max_steps=13)
    (alone,) = _steps(run, 1)
    taken = [row[0] for step in alone for row in step["rows"]]
    passes = [taken[begin : begin + NUM_ITEMS] for begin in range(0, len(taken) - NUM_ITEMS + 1, NUM_ITEMS)]
    assert len(passes) == 2
    assert all(sorted(each) == list(range(NUM_ITEMS)) for each in passes)
    assert passes[0] != passes[1]

    first = replace(run, layout={"tp": 2, "num_microbatches": 2}, saved_to=tmp_path / "a.ckpt", saved_after=5)
    second = replace(run, layout={"pp": 2, "num_microbatches": 2}, data={**run.data, "num_workers": 1})
    before, after = _steps(first, 2)[0][:5], _steps(replace(second, checkpoint=tmp_path / "a.ckpt"), 2)[0]
    assert [step["rows"] for step in before + after] == [step["rows"] for step in alone]
    assert [step["loss"] for step in before + after] == pytest.approx([step["loss"] for step in alone], rel=1e-5)
