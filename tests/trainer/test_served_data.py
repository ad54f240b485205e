"""Data modules yield the same samples on every layout, each once, with workers and after interruptions.

Samples of indexed datasets for GPT, BERT and T5 at several layouts are compared in tests/golden.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import NO_DROPOUT, Run, callback, fit, make_corpus
from tests.marks import exhaustive
from tests.parity.training import refusal
from tests.ranks import run_ranks

TP2 = {"tp": 2}
PP2 = {"pp": 2}


def _train(run: Run, save_to: Path | None = None) -> list[dict[str, Any]]:
    """Train; return loss and batch of each step."""
    steps: list[dict[str, Any]] = []

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        rows = {name: tensor.tolist() for name, tensor in batch.items()}
        steps.append({"loss": float(outputs["loss"]), "rows": rows})

    trainer, _ = fit(run, callback(on_train_batch_end=record))
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return steps


def _assert_same(
    actual: list[dict[str, Any]],
    expected: list[dict[str, Any]],
) -> None:
    for step, reference in zip(actual, expected, strict=True):
        assert step["rows"] == reference["rows"]
        # A different summation order, in fp32.
        assert step["loss"] == pytest.approx(reference["loss"], rel=1e-5)


@pytest.mark.gpu(2)
def test_workers_and_pinned_memory_keep_samples_on_gpus(tmp_path: Path) -> None:
    data = {"data_path": make_corpus(tmp_path), "split": "1,0,0"}
    run = Run(
        model=NO_DROPOUT,
        indexed=data,
        strategy=TP2,
        trainer={"max_steps": 6},
    )
    with_workers = run.but(indexed={"num_workers": 2}, trainer={"accelerator": "gpu"})

    on_cpu = run_ranks(_train, 2, run)
    on_gpu = run_ranks(_train, 2, with_workers)

    for expected, steps in zip(on_cpu, on_gpu, strict=True):
        assert steps == on_gpu[0]
        # Losses differ: initial weights are drawn on the device.
        assert [step["rows"] for step in steps] == [step["rows"] for step in expected]


def test_batch_size_rampup_equals_one_rank_and_resumes(tmp_path: Path) -> None:
    data = {
        "data_path": make_corpus(tmp_path),
        "split": "1,0,0",
        "rampup_batch_size": [4, 4, 24],
    }
    run = Run(
        model=NO_DROPOUT,
        indexed=data,
        strategy={"num_microbatches": 4},
        trainer={"max_steps": 7},
    )
    (expected,) = run_ranks(_train, 1, run)
    # One increment, from 4 to 8 rows over 24 samples: batches of 4 until 24 samples are consumed.
    assert [len(step["rows"]["text"]) for step in expected] == [4, 4, 4, 4, 4, 4, 8]

    path = tmp_path / "a.ckpt"
    first = run_ranks(
        _train,
        2,
        run.but(strategy=PP2, trainer={"max_steps": 5}),
        path,
    )
    rest = run_ranks(
        _train,
        2,
        run.but(strategy=TP2, ckpt_path=str(path)),
    )
    for steps in zip(first, rest, strict=True):
        _assert_same(steps[0] + steps[1], expected)


def _fit_on_path_of_rank(data_paths: list[str]) -> str:
    data_path = data_paths[int(os.environ["RANK"])]
    return refusal(fit, Run(indexed=data_path, trainer={"max_steps": 1}))


def test_data_missing_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    present = make_corpus(tmp_path)
    nowhere = str(tmp_path / "nowhere")

    for missing, paths in enumerate(([nowhere, present], [present, nowhere])):
        messages = run_ranks(_fit_on_path_of_rank, 2, paths)
        assert f"data_path={nowhere} needs two files" in messages[missing]
        assert messages[1 - missing] == f"{messages[missing]} (on rank {missing})"


# ---- instructions and map-style datasets ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def instructions(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on prompts and completions."""
    folder = tmp_path_factory.mktemp("instructions")
    records = [
        {"prompt": f"w{n} w{n + 1} ", "completion": " ".join(["w3"] * (1 + n % 4))}
        for n in range(30)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    files = {
        "data_path": str(folder / "pairs.jsonl"),
        "tokenizer": str(corpus.parent / "tok"),
    }
    return Run(
        model={**NO_DROPOUT, "vocab_size": 512, "n_positions": 32},
        indexed={**files, "split": "1,0,0", "seq_length": 32},
        data_module="InstructionDataModule",
        global_batch=4,
        trainer={"max_steps": 6},
    )


@pytest.mark.parametrize(
    "rows",
    [
        {"packing": True},
        exhaustive({"pad_to_multiple_of": 4}),
    ],
    ids=str,
)
def test_instruction_tuning_equals_one_rank(instructions: Run, rows: dict[str, Any]) -> None:
    run = instructions.but(indexed=rows)
    (expected,) = run_ranks(_train, 1, run)
    assert expected[-1]["loss"] < expected[0]["loss"]

    sharded = run.but(strategy={**TP2, **PP2, "sequence_parallel": True})
    for steps in run_ranks(_train, 4, sharded):
        _assert_same(steps, expected)


def test_each_epoch_has_every_item_once_after_resume_at_another_layout(tmp_path: Path) -> None:
    num_items = 22
    numbers = range(num_items)
    items = [[n, *((n * 7 + position) % 50 for position in range(11))] for n in numbers]
    run = Run(
        model=NO_DROPOUT,
        indexed={"train": [{"input_ids": item} for item in items]},
        data_module="DatasetDataModule",
        global_batch=4,
        trainer={"max_steps": 13},
    )
    (expected,) = run_ranks(_train, 1, run)
    taken = [row[0] for step in expected for row in step["rows"]["input_ids"]]
    assert 2 * num_items <= len(taken) < 3 * num_items
    first_epoch = taken[:num_items]
    second_epoch = taken[num_items : 2 * num_items]
    assert sorted(first_epoch) == sorted(second_epoch) == list(numbers)
    assert first_epoch != second_epoch

    path = tmp_path / "a.ckpt"
    first = run_ranks(
        _train,
        2,
        run.but(strategy=TP2, trainer={"max_steps": 5}),
        path,
    )
    second = run_ranks(
        _train,
        2,
        run.but(strategy=PP2, ckpt_path=str(path)),
    )
    _assert_same(first[0] + second[0], expected)
