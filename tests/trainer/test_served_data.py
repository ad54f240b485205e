"""Data modules serve every layout the same samples, each once, whoever reads them and however often it stops."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.corpus import make_corpus
from tests.ranks import run_ranks
from tests.unit.data.sentence_corpus import NUM_PIECES, random_documents, write_sentences

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>")
NUM_SENTINELS = 20
SEQ_LENGTH = 32
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": SEQ_LENGTH}
    | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    "bert": {"model_type": "megatron-bert", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    | {"intermediate_size": 32, "max_position_embeddings": SEQ_LENGTH}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"model_type": "t5", "num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    | {"dropout_rate": 0.0},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What each rank does."""

    folder: Path
    kind: str
    layout: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=lambda: {"max_steps": 3})
    accelerator: str = "cpu"
    checkpoint: Path | None = None
    saved_to: Path | None = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer, and datasets of its tokens: ``sentences`` and ``documents``."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("served")
    pieces = [*SPECIAL, *(f"<extra_id_{n}>" for n in range(NUM_SENTINELS))]
    shift = 107 - len(pieces)  # the documents' first token is 107, as their own tokenizer has it
    pieces += [f"[unused{n}]" for n in range(shift)]
    pieces += [f"{'##' if n % 3 == 0 else ''}w{n}" for n in range(NUM_PIECES)]
    model = models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]")
    roles = dict(zip(("pad", "unk", "cls", "sep", "mask", "eos"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), **{f"{role}_token": piece for role, piece in roles.items()}
    ).save_pretrained(folder / "tokenizer")
    write_sentences(folder / "sentences", random_documents(60))
    documents = [[[token for sentence in document for token in sentence]] for document in random_documents(40, 1)]
    write_sentences(folder / "documents", documents)
    return folder


def _run(run: Run) -> list[dict[str, Any]]:
    """Train; each step's loss and batch."""
    import os

    import lightning.pytorch as pl

    from lightning_megatron import (
        DatasetDataModule,
        IndexedDataModule,
        InstructionDataModule,
        MegatronModule,
        MegatronStrategy,
    )

    steps: list[dict[str, Any]] = []

    class Watching(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            rows = {name: tensor.tolist() for name, tensor in batch.items()}
            steps.append({"loss": float(loss), "rows": rows, "copy": self.megatron.data_parallel_rank})
            return loss

    pl.seed_everything(3, verbose=False)
    options: dict[str, Any] = {"micro_batch_size": 2, "seed": 5}
    data: pl.LightningDataModule
    if run.kind == "dataset":
        data = DatasetDataModule(**options, **run.data)
    elif run.kind == "instructions":
        data = InstructionDataModule(**options, **run.data)
    else:
        options |= {"seq_length": SEQ_LENGTH, "split": "1"}
        if run.kind != "gpt":
            options |= {"tokenizer": str(run.folder / "tokenizer"), "seq_length_decoder": 24}
        data = IndexedDataModule(**options, **run.data)
    model = MODELS.get(run.kind, MODELS["gpt"])
    module = Watching(model={**model, "vocab_size": 107 + NUM_PIECES}, lr=1e-2)
    trainer = pl.Trainer(
        accelerator=run.accelerator,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MegatronStrategy(**{"num_microbatches": 4, **run.layout}),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        **run.trainer,
    )
    trainer.fit(module, datamodule=data, ckpt_path=run.checkpoint)
    if run.saved_to is not None:
        trainer.save_checkpoint(run.saved_to)
    return steps


def _steps(run: Run, world_size: int) -> list[list[dict[str, Any]]]:
    results: list[list[dict[str, Any]]] = run_ranks(_run, world_size, run)
    return results


def _losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


def _dataset(folder: Path, kind: str) -> dict[str, Any]:
    return {"data_path": str(folder / ("documents" if kind == "gpt" else "sentences"))}


@pytest.mark.parametrize(
    ("kind", "layout", "num_microbatches"),
    [("gpt", {"tp": 2, "sequence_parallel": True}, 2), ("bert", {"tp": 2, "pp": 2}, 4), ("t5", {"pp": 2}, 2)],
    ids=["gpt", "bert", "t5"],
)
def test_every_layout_learns_the_same_from_the_same_samples(
    folder: Path, kind: str, layout: dict[str, Any], num_microbatches: int
) -> None:
    run = Run(folder=folder, kind=kind, data=_dataset(folder, kind))
    (alone,) = _steps(run, 1)
    assert alone[0]["loss"] != alone[1]["loss"]

    several = _steps(replace(run, layout={**layout, "num_microbatches": num_microbatches}), 4)
    for steps in several:
        # The same sums in another order, in fp32.
        assert _losses(steps) == pytest.approx(_losses(alone), rel=1e-5)
    by_copy = {steps[0]["copy"]: steps for steps in several}
    for number, expected in enumerate(alone):
        for name, rows in expected["rows"].items():
            # A mask that hides nothing is taken out of the batch of a copy.
            everything = np.ones((2 * num_microbatches, *np.shape(rows)[1:]))
            parts = np.array([by_copy[copy][number]["rows"].get(name, everything) for copy in sorted(by_copy)])
            # By microbatch, then copy.
            parts = parts.reshape(len(by_copy), num_microbatches, 2, *parts.shape[2:]).swapaxes(0, 1)
            assert np.array_equal(parts.reshape(np.shape(rows)), rows)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_workers_and_pinned_memory_hand_the_same_samples_to_gpus(folder: Path, kind: str) -> None:
    run = Run(folder=folder, kind=kind, data=_dataset(folder, kind), layout={"tp": 2}, trainer={"max_steps": 6})
    on_cpu = _steps(run, 2)
    on_gpu = _steps(replace(run, data={**run.data, "num_workers": 2}, accelerator="gpu"), 2)

    for expected, steps in zip(on_cpu, on_gpu, strict=True):
        # Not the losses: initial weights are drawn on the device.
        assert [step["rows"] for step in steps] == [step["rows"] for step in expected]
        assert _losses(steps) == _losses(on_gpu[0])


def test_a_batch_that_grows_equals_one_rank_and_goes_on_after_an_interruption(folder: Path, tmp_path: Path) -> None:
    data = {**_dataset(folder, "gpt"), "rampup_batch_size": [4, 4, 24]}
    run = Run(folder=folder, kind="gpt", data=data, trainer={"max_steps": 7})
    (alone,) = _steps(run, 1)
    # Two increments over 24 samples from 4 to 8 rows: 4 until 24 are consumed.
    assert [len(step["rows"]["text"]) for step in alone] == [4, 4, 4, 4, 4, 4, 8]

    half = {**run.layout, "pp": 2}
    first = _steps(replace(run, layout=half, trainer={"max_steps": 5}, saved_to=tmp_path / "a.ckpt"), 2)
    rest = _steps(replace(run, layout={"tp": 2, "num_microbatches": 4}, checkpoint=tmp_path / "a.ckpt"), 2)
    for steps in zip(first, rest, strict=True):
        assert _losses(steps[0] + steps[1]) == pytest.approx(_losses(alone), rel=1e-5)
        assert [step["rows"] for step in steps[0] + steps[1]] == [step["rows"] for step in alone]


def _fit_with_data_of_its_own(run: Run, data_paths: list[str]) -> str:
    import os

    from lightning_megatron.errors import DataError

    try:
        _run(replace(run, data={"data_path": data_paths[int(os.environ["RANK"])]}))
    except DataError as error:
        return str(error)
    return "no error"


def test_data_that_one_rank_does_not_see_are_an_error_on_all_ranks(folder: Path) -> None:
    run = Run(folder=folder, kind="gpt", layout={"num_microbatches": 2})
    there, nowhere = str(folder / "documents"), str(folder / "nowhere")

    messages = run_ranks(_fit_with_data_of_its_own, 2, run, [there, nowhere])
    assert f"data_path={nowhere} needs two files" in messages[1]
    assert messages[0] == f"{messages[1]} (on rank 1)"
    first, other = run_ranks(_fit_with_data_of_its_own, 2, run, [nowhere, there])
    assert f"data_path={nowhere} needs two files" in first
    assert other == f"{first} (on rank 0)"


# ---- instructions and map-style datasets ----------------------------------------------------------------------------

NUM_ITEMS = 22


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Prompts and completions of words of a tokenizer."""
    folder = tmp_path_factory.mktemp("instructions")
    make_corpus(folder)
    records = [{"prompt": f"w{n} w{n + 1} ", "completion": " ".join(["w3"] * (1 + n % 4))} for n in range(30)]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    files = {"data_path": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "tok")}
    data = {**files, "split": "8,2", "seq_length": SEQ_LENGTH}
    return Run(folder=folder, kind="instructions", data=data, layout={"num_microbatches": 2}, trainer={"max_steps": 6})


@pytest.mark.parametrize("rows", [{"packing": True}, {"pad_to_multiple_of": 4}], ids=str)
def test_instructions_teach_every_layout_the_same(instructions: Run, rows: dict[str, Any]) -> None:
    run = replace(instructions, data={**instructions.data, **rows})
    (alone,) = _steps(run, 1)
    assert alone[-1]["loss"] < alone[0]["loss"]

    for steps in _steps(replace(run, layout={"tp": 2, "pp": 2, "sequence_parallel": True, "num_microbatches": 2}), 4):
        assert [step["rows"] for step in steps] == [step["rows"] for step in alone]
        # The same sums in another order, in fp32.
        assert _losses(steps) == pytest.approx(_losses(alone), rel=1e-5)


def test_each_pass_takes_every_item_once_over_interruptions_at_other_layouts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train = str(tmp_path / "saved")
    items = [[number, *((number * 7 + place) % 50 for place in range(11))] for number in range(NUM_ITEMS)]
    datasets.Dataset.from_dict({"input_ids": items}).save_to_disk(train)
    two = {"num_microbatches": 2}
    run = Run(folder=tmp_path, kind="dataset", data={"train": train}, layout=two, trainer={"max_steps": 13})
    (alone,) = _steps(run, 1)
    taken = [row[0] for step in alone for row in step["rows"]["input_ids"]]
    passes = [taken[begin : begin + NUM_ITEMS] for begin in range(0, len(taken) - NUM_ITEMS + 1, NUM_ITEMS)]
    assert len(passes) == 2
    assert all(sorted(each) == list(range(NUM_ITEMS)) for each in passes)
    assert passes[0] != passes[1]

    first = replace(run, layout={"tp": 2, **two}, trainer={"max_steps": 5}, saved_to=tmp_path / "a.ckpt")
    second = replace(run, layout={"pp": 2, **two}, data={**run.data, "num_workers": 1}, checkpoint=tmp_path / "a.ckpt")
    steps = _steps(first, 2)[0] + _steps(second, 2)[0]
    assert [step["rows"] for step in steps] == [step["rows"] for step in alone]
    assert _losses(steps) == pytest.approx(_losses(alone), rel=1e-5)
