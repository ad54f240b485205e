"""Runs that cannot work are refused before they begin, with the value, the rule and the fix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray

from lightning_megatron.convert.registry import model_config
from lightning_megatron.data.loader import BatchShape
from lightning_megatron.data.special_tokens import TokenizerFacts
from lightning_megatron.datamodules import DatasetDataModule
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.megatron_datamodule import Run
from tests.unit.data.one_of_many_ranks import OneOfManyRanks, Recorder, make_data, make_documents, make_trainer
from tests.unit.data.sentence_corpus import random_documents, word_pieces, write_sentences


@pytest.fixture
def documents(tmp_path: Path) -> list[NDArray[np.uint16]]:
    return make_documents(tmp_path)


def test_a_split_without_weight_has_no_loader(tmp_path: Path, documents: list[NDArray[np.uint16]]) -> None:
    module = Recorder()
    trainer = make_trainer(tmp_path, OneOfManyRanks(), max_steps=2, limit_val_batches=1.0)

    trainer.fit(module, datamodule=make_data(tmp_path, split="1"))

    assert len(module.train_rows) == 2
    assert not module.val_batches
    with pytest.raises(ConfigError, match="IndexedDataModule has no valid split, which trainer.validate needs"):
        trainer.validate(module, datamodule=make_data(tmp_path, split="1"))
    with pytest.raises(ConfigError, match="IndexedDataModule has no test split, which trainer.test needs"):
        trainer.test(module, datamodule=make_data(tmp_path, split="1,1"))


def test_another_strategy_is_refused_by_name(tmp_path: Path, documents: list[NDArray[np.uint16]]) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, max_steps=1, default_root_dir=tmp_path)

    with pytest.raises(ConfigError, match=r"SingleDeviceStrategy .* needs Trainer\(strategy=MegatronStrategy"):
        trainer.fit(Recorder(), datamodule=make_data(tmp_path))


def _run(vocab_size: int | None = None) -> Run:
    shape = BatchShape(micro_batch_size=2, num_microbatches=2, data_parallel_size=2, data_parallel_rank=0)
    model = None if vocab_size is None else model_config({"model_type": "gpt2", "vocab_size": vocab_size})
    return Run(shape=shape, model=model)


def test_check_refuses_a_vocabulary_that_the_dataset_exceeds(
    tmp_path: Path, documents: list[NDArray[np.uint16]]
) -> None:
    largest = max(int(tokens.max()) for tokens in documents)

    make_data(tmp_path).check(_run(vocab_size=largest + 1))
    with pytest.raises(DataError, match=f"holds token {largest}, the model's vocab_size={largest} ends at"):
        make_data(tmp_path).check(_run(vocab_size=largest))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seq_length": 0}, "seq_length=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"split": "-1,1"}, "'-1' is not one"),
    ],
)
def test_impossible_arguments_are_refused_at_once(tmp_path: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_data(tmp_path, **option)


def test_a_validation_interval_longer_than_an_epoch_is_refused(
    tmp_path: Path, documents: list[NDArray[np.uint16]]
) -> None:
    def fit(**options: Any) -> None:
        trainer = make_trainer(tmp_path, OneOfManyRanks(), max_steps=4, **({"limit_val_batches": 1} | options))
        trainer.fit(Recorder(), datamodule=make_data(tmp_path))

    with pytest.raises(
        ConfigError, match="val_check_interval=5 is more than the 4 training steps of a Lightning epoch"
    ):
        fit(val_check_interval=5)
    with pytest.raises(ConfigError, match="val_check_interval=3 is more than the 2 training steps"):
        fit(val_check_interval=3, limit_train_batches=0.5)
    fit(val_check_interval=4)
    fit(val_check_interval=5, check_val_every_n_epoch=None)
    fit(val_check_interval=5, limit_val_batches=0)


def test_a_dataset_on_disk_without_items_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": []}).save_to_disk(tmp_path / "empty")

    with pytest.raises(DataError, match="empty holds a dataset without items; save one with"):
        DatasetDataModule(train=str(tmp_path / "empty")).check(_run())


def test_samples_are_those_of_the_model_that_is_trained_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenizerFacts, "read", lambda folder: word_pieces())
    write_sentences(tmp_path / "corpus", random_documents(60))
    data = make_data(tmp_path, split="1", seq_length=32, tokenizer="word-pieces")
    seen: list[bool] = []

    class Watching(Recorder):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append("next_sentence_label" in batch)
            return self.weight * 0.0

    for task in ("masked_lm", "pretraining", "masked_lm"):
        module = Watching()
        module.model_config = SimpleNamespace(vocab_size=2**16, architecture="bert", task=task)  # type: ignore[assignment]
        make_trainer(tmp_path, OneOfManyRanks(), max_steps=1).fit(module, datamodule=data)

    assert seen == [False, True, False]
