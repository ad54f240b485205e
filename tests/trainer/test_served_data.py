"""Data modules serve every layout the same samples, each once, whoever reads them and however often it stops.

What they serve of indexed datasets to a GPT, BERT and T5 at several layouts: tests/golden.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import NO_DROPOUT, Run, callback, fit, make_corpus
from tests.parity.training import refusal
from tests.ranks import run_ranks

TP2, PP2 = {"tp": 2}, {"pp": 2}


def _train(run: Run, save_to: Path | None = None) -> list[dict[str, Any]]:
    """Each step's loss and batch."""
    steps: list[dict[str, Any]] = []

    def keep(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = {name: tensor.tolist() for name, tensor in batch.items()}
        steps.append({"loss": float(outputs["loss"]), "rows": rows})

    trainer, _ = fit(run, callback(on_train_batch_end=keep))
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return steps


def _assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [step["rows"] for step in found] == [step["rows"] for step in expected]
    # The same sums in another order, in fp32.
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in expected], rel=1e-5)


@pytest.mark.gpu(2)
def test_workers_and_pinned_memory_hand_the_same_samples_to_gpus(tmp_path: Path) -> None:
    data = {"data_path": make_corpus(tmp_path), "split": "1,0,0"}
    run = Run(model=NO_DROPOUT, indexed=data, strategy=TP2, trainer={"max_steps": 6})
    on_cpu = run_ranks(_train, 2, run)
    on_gpu = run_ranks(_train, 2, run.but(indexed={"num_workers": 2}, trainer={"accelerator": "gpu"}))

    for expected, steps in zip(on_cpu, on_gpu, strict=True):
        assert steps == on_gpu[0]
        # Not the losses: initial weights are drawn on the device.
        assert [step["rows"] for step in steps] == [step["rows"] for step in expected]


def test_a_batch_that_grows_equals_one_rank_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    data = {"data_path": make_corpus(tmp_path), "split": "1,0,0", "rampup_batch_size": [4, 4, 24]}
    run = Run(model=NO_DROPOUT, indexed=data, strategy={"num_microbatches": 4}, trainer={"max_steps": 7})
    (alone,) = run_ranks(_train, 1, run)
    # Two increments over 24 samples from 4 to 8 rows: 4 until 24 are consumed.
    assert [len(step["rows"]["text"]) for step in alone] == [4, 4, 4, 4, 4, 4, 8]

    path = tmp_path / "a.ckpt"
    first = run_ranks(_train, 2, run.but(strategy=PP2, trainer={"max_steps": 5}), path)
    rest = run_ranks(_train, 2, run.but(strategy=TP2, ckpt_path=str(path)))
    for steps in zip(first, rest, strict=True):
        _assert_same(steps[0] + steps[1], alone)


def _fit_with_data_of_its_own(data_paths: list[str]) -> str:
    return refusal(fit, Run(indexed=data_paths[int(os.environ["RANK"])], trainer={"max_steps": 1}))


def test_data_that_one_rank_does_not_see_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    there, nowhere = make_corpus(tmp_path), str(tmp_path / "nowhere")

    for missing, paths in enumerate(([nowhere, there], [there, nowhere])):
        messages = run_ranks(_fit_with_data_of_its_own, 2, paths)
        assert f"data_path={nowhere} needs two files" in messages[missing]
        assert messages[1 - missing] == f"{messages[missing]} (on rank {missing})"


# ---- instructions and map-style datasets ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def instructions(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Prompts and completions of words of a tokenizer."""
    folder = tmp_path_factory.mktemp("instructions")
    records = [{"prompt": f"w{n} w{n + 1} ", "completion": " ".join(["w3"] * (1 + n % 4))} for n in range(30)]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    files = {"data_path": str(folder / "pairs.jsonl"), "tokenizer": str(corpus.parent / "tok")}
    return Run(
        model={**NO_DROPOUT, "vocab_size": 512, "n_positions": 32},
        indexed={**files, "split": "1,0,0", "seq_length": 32},
        data_module="InstructionDataModule",
        global_batch=4,
        trainer={"max_steps": 6},
    )


@pytest.mark.parametrize(
    "rows", [{"packing": True}, pytest.param({"pad_to_multiple_of": 4}, marks=pytest.mark.exhaustive)], ids=str
)
def test_instructions_teach_every_layout_the_same(instructions: Run, rows: dict[str, Any]) -> None:
    run = instructions.but(indexed=rows)
    (alone,) = run_ranks(_train, 1, run)
    assert alone[-1]["loss"] < alone[0]["loss"]

    for steps in run_ranks(_train, 4, run.but(strategy={**TP2, **PP2, "sequence_parallel": True})):
        _assert_same(steps, alone)


def test_each_pass_takes_every_item_once_over_interruptions_at_other_layouts(tmp_path: Path) -> None:
    num_items = 22
    items = [[number, *((number * 7 + place) % 50 for place in range(11))] for number in range(num_items)]
    run = Run(
        model=NO_DROPOUT,
        indexed={"train": [{"input_ids": item} for item in items]},
        data_module="DatasetDataModule",
        global_batch=4,
        trainer={"max_steps": 13},
    )
    (alone,) = run_ranks(_train, 1, run)
    taken = [row[0] for step in alone for row in step["rows"]["input_ids"]]
    passes = [taken[begin : begin + num_items] for begin in range(0, len(taken) - num_items + 1, num_items)]
    assert len(passes) == 2
    assert all(sorted(each) == list(range(num_items)) for each in passes)
    assert passes[0] != passes[1]

    path = tmp_path / "a.ckpt"
    first = run_ranks(_train, 2, run.but(strategy=TP2, trainer={"max_steps": 5}), path)
    second = run_ranks(_train, 2, run.but(strategy=PP2, ckpt_path=str(path)))
    _assert_same(first[0] + second[0], alone)
