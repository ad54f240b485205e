"""``IndexedDataModule`` in a Trainer: each sample once in Megatron's order, resume, refused runs."""

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron import (
    DatasetDataModule,
    InstructionDataModule,
    MegatronModule,
    MegatronStrategy,
    PreferenceDataModule,
)
from lightning_megatron.convert.registry import model_config
from lightning_megatron.data.batch_shape import BatchShape
from lightning_megatron.data.masked import MaskingOptions
from lightning_megatron.datamodules.base import Run
from lightning_megatron.datamodules.indexed import _READ_BY, IndexedDataModule
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.run.launch import ScriptLauncher
from lightning_megatron.run.restarts import LAUNCHER
from tests.models import QUIET
from tests.recording import recorded_warnings
from tests.tokenizers import byte_level_tokenizer
from tests.unit.data.corpus import build, engine_rows, write_corpus, write_legacy

pytestmark = pytest.mark.filterwarnings(
    # Tests keep checkpoints in one directory and resume without the callback that wrote them.
    "ignore:Checkpoint directory",
    "ignore:Be aware that when using `ckpt_path`",
    # Some runs are longer than the corpus; one test expects the warning.
    "ignore:The run goes on at sample",
)


class FakeMegatronStrategy(SingleDeviceStrategy):
    """Single-process strategy with the attributes of ``MegatronStrategy`` that data modules read."""

    def __init__(self, num_microbatches: int = 1) -> None:
        super().__init__("cpu")
        self.data_parallel_size = 1
        self.data_parallel_rank = 0
        self.num_microbatches = num_microbatches
        self.tp = 1
        self.sequence_parallel = False
        self.is_data_source = True


class Recorder(LightningModule):
    """Records its training rows, and the steps at which validation ran."""

    def __init__(self, ask_num_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_rows: list[Tensor] = []
        self.validated: list[int] = []
        self._ask_num_steps = ask_num_steps

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        (rows,) = batch.values()
        self.train_rows.append(rows)
        return self.weight * 0.0

    def validation_step(self, batch: dict[str, Tensor]) -> None: ...

    def on_validation_epoch_start(self) -> None:
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._ask_num_steps:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def rows(self) -> NDArray[np.int64]:
        return torch.cat(self.train_rows).numpy()


@pytest.fixture(autouse=True)
def documents(tmp_path: Path) -> list[NDArray[np.uint16]]:
    """Documents of the dataset ``corpus``, whose splits leave a partial sample at the end."""
    return write_corpus(tmp_path / "corpus", 63, longest=20)


def _data(folder: Path, **options: Any) -> IndexedDataModule:
    defaults: dict[str, Any] = {
        "data_path": str(folder / "corpus"),
        "split": "8,1,1",
        "seq_length": 8,
    }
    return IndexedDataModule(**defaults | {"micro_batch_size": 2} | options)


def _run(
    folder: Path,
    num_microbatches: int = 1,
    *,
    data: dict[str, Any] | None = None,
    datamodule: Any = None,
    module: Recorder | None = None,
    ckpt_path: str | None = None,
    phase: str = "fit",
    **options: Any,
) -> Recorder:
    """Run ``phase`` with a checkpoint of each step in ``step=N.ckpt``; return the module."""
    module = module or Recorder()
    checkpoint = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    settings: dict[str, Any] = {
        **QUIET,
        "enable_checkpointing": True,
        "limit_val_batches": 0,
        "callbacks": [checkpoint],
    }
    settings |= {
        "accelerator": "cpu",
        "strategy": FakeMegatronStrategy(num_microbatches),
        **options,
    }
    trainer = Trainer(default_root_dir=folder, **settings)
    path = ckpt_path and str(folder / ckpt_path)
    getattr(trainer, phase)(
        module,
        datamodule=datamodule or _data(folder, **(data or {})),
        ckpt_path=path,
    )
    return module


def _expected(folder: Path, num_samples: int | None) -> NDArray[np.int64]:
    """Megatron-Core's samples of the corpus."""
    return engine_rows(
        ([str(folder / "corpus")], None),
        num_samples,
        seq_length=8,
    )


@pytest.mark.parametrize(
    ("num_microbatches", "max_steps"),
    [(12, 9), (3, 10)],
)
def test_resume_with_another_batch_size_is_exact_within_a_pass(
    tmp_path: Path, num_microbatches: int, max_steps: int
) -> None:
    first = _run(tmp_path, 6, max_steps=3)
    second = _run(tmp_path, num_microbatches, max_steps=max_steps, ckpt_path="step=3.ckpt")
    assert len(second.train_rows) == max_steps - 3
    order = _expected(tmp_path, 36)
    taken = np.concatenate((first.rows, second.rows))
    assert np.array_equal(taken[: len(order)], order[: len(taken)])
    for begin in range(len(order), len(taken), len(order)):
        rows = [row.tobytes() for row in taken[begin : begin + len(order)]]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= {row.tobytes() for row in order}


def test_resume_in_another_order_warns(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    _run(tmp_path, max_steps=3)
    _run(tmp_path, max_steps=5, ckpt_path="step=3.ckpt")
    assert not any("another order" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match="another order than the checkpoint's"):
        _run(tmp_path, max_steps=5, data={"seed": 1}, ckpt_path="step=3.ckpt")


@pytest.mark.parametrize("parts", [1, 2])
def test_resume_on_other_tokens_of_equal_lengths_warns(
    tmp_path: Path, documents: list[NDArray[np.uint16]], parts: int
) -> None:
    tokens = [[document.tolist()] for document in documents]
    same = build(tmp_path / "same", tokens, "int32")
    other = build(tmp_path / "other", [[[token ^ 1 for token in row]] for (row,) in tokens])

    def resume(prefix: str) -> list[str]:
        with recorded_warnings("another order than the checkpoint's") as messages:
            data = {"data_path": [str(tmp_path / "corpus"), prefix][-parts:]}
            _run(tmp_path, max_steps=4, data=data, ckpt_path="step=3.ckpt")
        return messages

    _run(tmp_path, max_steps=3, data={"data_path": [str(tmp_path / "corpus")] * parts})
    assert resume(same) == []
    assert resume(other)


def test_resume_with_other_shuffling_warns(tmp_path: Path) -> None:
    rows = [{"row": torch.tensor([number])} for number in range(16)]

    def resume(**options: Any) -> list[str]:
        data = DatasetDataModule(train=rows, micro_batch_size=2, **options)
        with recorded_warnings("another order than the checkpoint's") as messages:
            _run(tmp_path, max_steps=3, datamodule=data, ckpt_path="step=2.ckpt")
        return messages

    _run(tmp_path, max_steps=2, datamodule=DatasetDataModule(train=rows, micro_batch_size=2))
    assert resume() == []
    assert resume(seed=1)
    assert resume(shuffle=False)
    rows = [{"row": row["row"] + 1} for row in rows]
    assert resume()


@pytest.mark.parametrize(
    ("old_size", "new_size", "saved_at", "ask_num_steps"),
    [(4, 2, 2, True), (2, 4, 30, False)],
)
def test_epochs_after_a_resume_with_another_batch_size_are_complete(
    tmp_path: Path, old_size: int, new_size: int, saved_at: int, ask_num_steps: bool
) -> None:
    options: dict[str, Any] = {
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "max_epochs": 3,
    }
    options["reload_dataloaders_every_n_epochs"] = 1
    first, rest = (
        _run(tmp_path, size, module=Recorder(ask_num_steps), ckpt_path=path, **options)
        for size, path in ((old_size, None), (new_size, f"step={saved_at}.ckpt"))
    )
    num_samples = len(_expected(tmp_path, None))
    old_steps, new_steps = num_samples // (2 * old_size), num_samples // (2 * new_size)  # per epoch
    epoch, epoch_step = divmod(saved_at, old_steps)
    ends = [saved_at + (num_samples - epoch_step * 2 * old_size) // (2 * new_size)]
    ends += [ends[0] + new_steps * number for number in range(1, 3 - epoch)]
    assert rest.validated == ends
    assert len(rest.rows) == (ends[-1] - saved_at) * 2 * new_size
    begin = epoch * old_steps * 2 * old_size
    taken = np.concatenate(
        [
            first.rows[begin : saved_at * 2 * old_size],
            rest.rows,
        ]
    )[: (num_samples // 8) * 8]
    assert len(np.unique(taken, axis=0)) == len(taken)  # the resumed epoch repeats no row


def test_epochs_of_varying_length_need_reloaded_dataloaders(tmp_path: Path) -> None:
    ramp = {"data": {"rampup_batch_size": [2, 2, 12]}}
    _run(tmp_path, 2, max_epochs=3)
    for max_epochs, options in ((3, {"ckpt_path": "step=4.ckpt"}), (2, ramp)):
        with pytest.raises(
            ConfigError, match=r"set Trainer\(reload_dataloaders_every_n_epochs=1\)"
        ):
            _run(tmp_path, 4, max_epochs=max_epochs, **options)
        _run(tmp_path, 4, max_epochs=1, **options)  # no further epoch


def test_unused_split_may_be_empty(tmp_path: Path) -> None:
    small = build(
        tmp_path / "small",
        [[list(range(40))], [list(range(40))]],
    )
    blend = [0.5, str(tmp_path / "corpus"), 0.5, small]
    for data, message in (
        ({"split": "1"}, "no valid split for trainer.validate"),
        ({"data_path": blend}, r"gives valid 0 of 2 documents of .*small"),
    ):
        assert len(_run(tmp_path, max_steps=2, data=data).train_rows) == 2
        with pytest.raises(ConfigError, match=message):
            _run(tmp_path, data=data, phase="validate", limit_val_batches=1)


def test_legacy_formats_give_the_same_samples(
    tmp_path: Path, documents: list[NDArray[np.uint16]]
) -> None:
    """In a blend with a dataset in the current format."""
    first, second = ([[tokens.tolist()] for tokens in documents[half::2]] for half in (0, 1))
    new = [build(tmp_path / "first", first), build(tmp_path / "second", second)]
    paths = (new, [write_legacy(tmp_path / "old", first), new[1]])
    current, legacy = (
        _run(
            tmp_path,
            max_steps=6,
            data={"data_path": path, "split": "1"},
        ).rows
        for path in paths
    )
    assert np.array_equal(legacy, current)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_missing_data_is_refused_before_launch_unless_prepared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Preparing(IndexedDataModule):
        def prepare_data(self) -> None: ...

    def start(launcher: Any) -> None:
        raise InterruptedError("would start")

    # Restored after the test, as the launcher sets it.
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    monkeypatch.setattr(ScriptLauncher, "_has_failed", False)
    monkeypatch.setattr(ScriptLauncher, "_call_children_scripts", start)
    module = MegatronModule(
        model={
            "model_type": "gpt2",
            "n_layer": 2,
            "n_embd": 16,
            "n_head": 2,
        }
    )
    for kind, error in ((IndexedDataModule, DataError), (Preparing, InterruptedError)):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=MegatronStrategy(tp=2),
            max_steps=1,
            logger=False,
        )
        with pytest.raises(error, match=r"data_path=.*nothing needs two files|would start"):
            trainer.fit(module, datamodule=kind(str(tmp_path / "nothing"), seq_length=8))


@pytest.mark.parametrize("kind", [IndexedDataModule, InstructionDataModule, PreferenceDataModule])
def test_split_without_a_path_to_divide_is_refused(kind: Any) -> None:
    options = {"train_data_path": "books", "tokenizer": "tok"}
    default = inspect.signature(kind).parameters["split"].default
    kind(split=default, **options)
    with pytest.raises(ConfigError, match="split='8,1,1': expected data_path, which it divides"):
        kind(split="8,1,1", **options)
    with pytest.raises(ConfigError, match="expected data_path and split, or only paths of splits"):
        kind(data_path="web", **options)


@pytest.mark.parametrize("option", _READ_BY)
def test_option_that_the_objective_does_not_read_is_refused(option: str, tmp_path: Path) -> None:
    """Of a dataset that is not there: it is refused first where the option is read."""
    values: dict[str, Any] = {
        "seq_length_decoder": 64,
        "masking": MaskingOptions(probability=0.5),
        "t5_format": "megatron",
        "sentence_order": True,
        "drop_last_partial_validation_sequence": False,
    }
    models = {
        "gpt": {"model_type": "gpt2"},
        "bert": {"model_type": "megatron-bert"},
        "t5": {"model_type": "t5"},
    }
    shape = BatchShape(
        micro_batch_size=2, num_microbatches=2, data_parallel_size=2, data_parallel_rank=0
    )
    for name, config in models.items():
        data = IndexedDataModule(str(tmp_path / "nothing"), **{option: values[option]})
        expected = "tokenizer=None|nothing needs two files"
        if name not in _READ_BY[option]:
            expected = rf"{option}=.*: expected the objective .*, got {name}; leave {option} out"
        with pytest.raises(ConfigError, match=expected):
            data.check(Run(shape=shape, model=model_config(config)))


def test_token_beyond_the_vocabulary_is_refused(
    tmp_path: Path, documents: list[NDArray[np.uint16]]
) -> None:
    largest = max(int(tokens.max()) for tokens in documents)
    shape = BatchShape(
        micro_batch_size=2, num_microbatches=2, data_parallel_size=2, data_parallel_rank=0
    )
    model = model_config({"model_type": "gpt2", "vocab_size": largest + 1})
    _data(tmp_path).check(Run(shape=shape, model=model))
    with pytest.raises(
        DataError, match=f"expected tokens below the model's vocab_size={largest}, got {largest}"
    ):
        _data(tmp_path).check(Run(shape=shape, model=replace(model, vocab_size=largest)))
    # A GPT reads no tokenizer; one that is named must still be that of the dataset.
    named = _data(tmp_path, tokenizer=str(tmp_path / "words"))
    with pytest.raises(ConfigError, match="words"):
        named.check(Run(shape=shape, model=model))
    byte_level_tokenizer({largest + 1: b"a"}).save_pretrained(tmp_path / "words")
    with pytest.raises(DataError, match=rf"tokenizer=.*words: expected .*, got {largest + 1}"):
        named.check(Run(shape=shape, model=model))


def test_validation_interval_longer_than_an_epoch_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "limit_val_batches": 1}
    with pytest.raises(ConfigError, match="val_check_interval=3 is more than the 2 training steps"):
        _run(tmp_path, val_check_interval=3, limit_train_batches=0.5, **options)
    _run(tmp_path, val_check_interval=4, **options)
    _run(tmp_path, val_check_interval=5, check_val_every_n_epoch=None, **options)
