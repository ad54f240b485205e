"""Texts that are tokenized while they are trained on: each once, at any layout, and exactly after an interruption."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoint.runs import (
    NO_DROPOUT,
    Run,
    callback,
    fit,
    make_corpus,
    make_module,
    make_trainer,
)
from tests.marks import exhaustive
from tests.parity.training import refusal
from tests.ranks import run_ranks
from tests.recording import recorded_warnings
from tests.tokenizers import number_tokenizer

SEQ_LENGTH = 32
NUM_TEXTS = 120
LENGTHS = Counter({number: 1 + 3 * (number * number % 9) for number in range(NUM_TEXTS)})
TEXTS = [" ".join([str(number)] * length) for number, length in LENGTHS.items()]
"""Each is a token of its own, repeated."""
Steps = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on JSON lines."""
    folder = tmp_path_factory.mktemp("stream")
    number_tokenizer(NUM_TEXTS).save_pretrained(folder / "tok")
    (folder / "texts").mkdir()
    for part in range(4):
        texts = TEXTS[part * 30 : part * 30 + 30]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "texts" / f"{part}.jsonl").write_text(lines)
    return Run(
        model={**NO_DROPOUT, "vocab_size": NUM_TEXTS + 1, "n_positions": SEQ_LENGTH},
        indexed={
            "data_path": str(folder / "texts"),
            "tokenizer": str(folder / "tok"),
            "seq_length": SEQ_LENGTH,
            "shuffle_buffer": 20,
            "num_workers": 0,
        },
        data_module="StreamingTextDataModule",
    )


def _steps(
    run: Run,
    save_at: int | None = None,
    path: Path | None = None,
    callbacks: tuple[Any, ...] = (),
) -> Steps:
    """Train; return loss and batch of each step, to that with a checkpoint: the rest is lost, as by a kill."""
    steps: Steps = []

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        rows = {name: tensor.tolist() for name, tensor in batch.items()}
        replica = trainer.strategy.data_parallel_rank
        steps.append({"loss": float(outputs["loss"]), "rows": rows, "replica": replica})
        if trainer.global_step == save_at:
            trainer.save_checkpoint(path)

    fit(run, callback(on_train_batch_end=record), *callbacks)
    return steps[:save_at]


def _targets(*runs: list[Steps]) -> Counter[int]:
    """How often each token was a target, over the replicas of runs."""
    counts: Counter[int] = Counter()
    for ranks in runs:
        replicas = {steps[0]["replica"]: steps for steps in ranks}
        for steps in replicas.values():
            rows = [row for step in steps for row in step["rows"]["text"]]
            counts.update(token for row in rows for token in row[1:] if token >= 0)
    return counts


EPOCHS = {"max_steps": -1, "max_epochs": 2}
"""Fourteen steps."""


@pytest.mark.parametrize(
    ("trainer", "workers"),
    [
        (EPOCHS, 0),
        exhaustive({"max_steps": 14}, 0),
        exhaustive(EPOCHS, 4),
        exhaustive({"max_steps": 14}, 4),
    ],
    ids=str,
)
def test_resume_is_exact(
    run: Run,
    trainer: dict[str, Any],
    workers: int,
    tmp_path: Path,
) -> None:
    run = run.but(trainer=trainer)
    path = tmp_path / "a.ckpt"
    expected = run_ranks(_steps, 2, run)
    with_workers = run.but(indexed={"num_workers": workers})
    first = run_ranks(_steps, 2, with_workers, 9, path)
    rest = run_ranks(_steps, 2, with_workers.but(ckpt_path=str(path)))
    for steps, before, after in zip(expected, first, rest, strict=True):
        assert len(before) == 9
        assert before + after == steps
    assert (path / "meta.pt").stat().st_size < 20_000
    if trainer is EPOCHS:
        # Two passes, each with two readers, whose first token is no target.
        tokens = LENGTHS + Counter({NUM_TEXTS: NUM_TEXTS})
        targets = _targets(expected)
        assert targets - tokens - tokens == Counter()
        assert (tokens + tokens - targets).total() == 4


@pytest.mark.parametrize("size", [exhaustive(1), exhaustive(3), 4])
def test_resume_at_another_layout_repeats_and_loses_nothing(
    run: Run, size: int, tmp_path: Path
) -> None:
    run = run.but(trainer={"max_steps": -1, "max_epochs": 1})
    path = tmp_path / "a.ckpt"
    first = run_ranks(_steps, 2, run, 3, path)
    other = run.but(ckpt_path=str(path))
    if size == 3:
        other = other.but(global_batch=6)
    if size == 4:
        # One replica of four ranks.
        other = other.but(strategy={"tp": 2, "pp": 2})
    rest = run_ranks(_steps, size, other)
    if size == 4:
        assert all(
            [step["rows"] for step in steps] == [step["rows"] for step in rest[0]] for steps in rest
        )
    tokens = LENGTHS + Counter({NUM_TEXTS: NUM_TEXTS})
    targets = _targets(first, rest)
    assert targets - tokens == Counter()
    assert (tokens - targets).total() <= 6


def _with_and_without_a_search(runs: list[Run]) -> list[tuple[Steps, Steps]]:
    """Steps of runs after Lightning has searched a learning rate, and without."""
    from lightning.pytorch.callbacks import LearningRateFinder

    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    return [(_steps(run, callbacks=(finder,)), _steps(run)) for run in runs]


def test_search_of_a_learning_rate_leaves_no_sample_out(run: Run, tmp_path: Path) -> None:
    trainer = {"max_steps": 3, "default_root_dir": str(tmp_path)}
    indexed = Run(model=NO_DROPOUT, indexed=make_corpus(tmp_path), trainer=trainer)
    ((*results,),) = run_ranks(_with_and_without_a_search, 1, [run.but(trainer=trainer), indexed])
    for searched, plain in results:
        assert len(plain) == 3
        assert searched == plain


def _in_short_epochs(run: Run) -> tuple[Steps, Steps]:
    """Steps of one epoch, and of several."""
    return _steps(run), _steps(run.but(trainer={"limit_train_batches": 2}))


def test_next_of_lightnings_epochs_goes_on_in_the_stream(run: Run) -> None:
    for expected, found in run_ranks(_in_short_epochs, 2, run.but(trainer={"max_steps": 5})):
        assert len(expected) == 5
        assert found == expected


def _with_eod_options(run: Run) -> Steps:
    from lightning_megatron import GPTTrainStep

    step = GPTTrainStep(
        eod_token=NUM_TEXTS,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    return _steps(run.but(module={"train_step": step}))


def test_separate_documents_train_as_the_train_step_separates_them(run: Run) -> None:
    run = run.but(
        trainer={"max_steps": 2},
        strategy={"num_microbatches": 1},
        global_batch=4,
    )
    (separated,) = run_ranks(_steps, 1, run.but(indexed={"separate_documents": True}))
    (expected,) = run_ranks(_with_eod_options, 1, run)
    assert [one["loss"] for one in separated] == [one["loss"] for one in expected]


def _validate(run: Run) -> float:
    import lightning.pytorch as pl

    from lightning_megatron import StreamingTextDataModule

    pl.seed_everything(run.seed, verbose=False)
    assert isinstance(run.indexed, dict)
    settings = dict(run.indexed)
    settings["valid_data_path"] = settings.pop("data_path")
    data = StreamingTextDataModule(**settings, micro_batch_size=3)
    (metrics,) = make_trainer(run).validate(
        make_module(run),
        datamodule=data,
        verbose=False,
    )
    return float(metrics["val_loss"])


def test_validation_reads_all_texts_at_any_layout(run: Run) -> None:
    (expected,) = run_ranks(_validate, 1, run)
    for loss in run_ranks(_validate, 2, run):
        assert loss == pytest.approx(expected, rel=1e-5)


def _on_hugging_face(
    run: Run, save_at: int | None = None, path: Path | None = None
) -> tuple[Steps, list[str]]:
    import datasets

    stream = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=4)
    with recorded_warnings("cannot resume exactly") as messages:
        steps = _steps(run.but(indexed={"data_path": None, "dataset": stream}), save_at, path)
    return steps, messages


def test_hugging_face_stream_resumes_exactly(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    run = run.but(trainer={"max_steps": -1, "max_epochs": 1})
    path = tmp_path / "a.ckpt"
    expected = run_ranks(_on_hugging_face, 2, run)
    run_ranks(_on_hugging_face, 2, run, 3, path)
    rest = run_ranks(_on_hugging_face, 2, run.but(ckpt_path=str(path)))
    for (steps, messages), (after, _) in zip(expected, rest, strict=True):
        assert messages == []
        assert steps[3:] == after


def _refused(run: Run, changes: dict[str, Any]) -> str:
    return refusal(fit, run.but(**changes))


def _steps_of_older_version(run: Run, save_at: int, path: Path) -> Steps:
    """Steps of a run whose checkpoint does not tell the tokenizer."""
    from lightning_megatron import StreamingTextDataModule

    state_dict = StreamingTextDataModule.state_dict

    def old_state(data: StreamingTextDataModule) -> dict[str, Any]:
        state = state_dict(data)
        state.pop("tokenizer", None)
        return state

    with mock.patch.object(StreamingTextDataModule, "state_dict", old_state):
        return _steps(run, save_at, path)


def _steps_and_warnings(run: Run) -> tuple[Steps, list[Any]]:
    with recorded_warnings("of other texts") as messages:
        return _steps(run), messages


def test_resume_with_another_tokenizer_of_the_same_size_is_refused(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    number_tokenizer(NUM_TEXTS, first=1).save_pretrained(tmp_path / "tok")
    run = run.but(trainer={"max_steps": 2})
    expected = run_ranks(_steps, 2, run)
    run_ranks(_steps, 2, run, 1, path)
    run_ranks(_steps_of_older_version, 2, run, 1, tmp_path / "old.ckpt")
    end = run.but(ckpt_path=str(path))
    other = {"indexed": {"tokenizer": str(tmp_path / "tok")}}
    for message in run_ranks(_refused, 2, end, other):
        assert "tok: expected the tokenizer of the checkpoint, got one that makes other" in message
    old = end.but(ckpt_path=str(tmp_path / "old.ckpt"))
    for steps, (rest, messages) in zip(
        expected, run_ranks(_steps_and_warnings, 2, old), strict=True
    ):
        assert rest == steps[1:]
        assert messages == []
    # Files of the same names and sizes, with the texts in another order.
    assert isinstance(run.indexed, dict)
    copies = shutil.copytree(run.indexed["data_path"], tmp_path / "texts")
    first = copies / "0.jsonl"
    first.write_text("".join(reversed(first.read_text().splitlines(keepends=True))))
    replaced = end.but(indexed={"data_path": str(copies)})
    (_, messages), _ = run_ranks(_steps_and_warnings, 2, replaced)
    assert len(messages) == 1


def test_mistakes_are_refused_before_training(run: Run, tmp_path: Path) -> None:
    run = run.but(trainer={"max_steps": 1})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"indexed": {"data_path": str(tmp_path / "none.jsonl")}}, "does not exist"),
        ({"indexed": {"tokenizer": None}}, "tokenizer=None: expected the directory"),
        ({"indexed": {"dataset": [1]}}, "expected one source of training texts, got two"),
        ({"indexed": {"data_path": None, "dataset": [1]}}, "expected a datasets.IterableDataset"),
        ({"model": {"vocab_size": 99}}, "gives ids up to 120, the model's vocab_size is 99"),
        ({"indexed": {"seq_length": 64}}, "seq_length"),
    ]
    for changes, expected in cases:
        (message,) = run_ranks(_refused, 1, run, changes)
        assert expected in message
