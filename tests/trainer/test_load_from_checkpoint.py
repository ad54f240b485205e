"""``load_from_checkpoint`` restores a module for training, and for inference without a Trainer."""

import enum
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.training import (
    MODELS,
    TP2,
    TP2_PP2,
    Case,
    common_result,
    loader_of,
    metrics_of,
    refusal,
    trainer_of,
)
from tests.ranks import run_ranks

CASE = Case(layout=TP2_PP2, steps=2)
TOKENS = torch.arange(24).reshape(2, 12) % 80


class Size(enum.IntEnum):
    SMALL = 3


class Kind(enum.StrEnum):
    FIRST = "first"


def _module(**changes: Any) -> Any:
    from lightning_megatron import GenerationOptions, LRSchedule, MegatronModule, OptimizerOptions
    from lightning_megatron.engine.optimizer_options import GroupMultipliers

    arguments: dict[str, Any] = {
        "model": MODELS["gpt2"],
        "position_embedding_type": "rotary",
        "lr": 2e-3,
        "optimizer": OptimizerOptions(
            beta2=0.95, multipliers={"*word_embeddings*": GroupMultipliers(lr_mult=0.5)}
        ),
        "lr_schedule": LRSchedule(style="cosine", warmup_steps=1),
        "generation": GenerationOptions(max_new_tokens=3, eos_token_id=(7, 8)),
        "make_vocab_size_divisible_by": 8,
    }
    return MegatronModule(**{**arguments, **changes})


def _train_and_save(folder: str) -> dict[str, Any]:
    """Train, save, and return logits, validation loss and hyperparameters."""
    from lightning.pytorch.loggers import CSVLogger

    module = _module()
    module.save_hyperparameters(
        {
            "size": Size.SMALL,
            "kinds": {Kind.FIRST: [Kind.FIRST]},
        }
    )
    trainer = trainer_of(CASE, logger=CSVLogger(folder, version=0))
    trainer.fit(module, loader_of(CASE))
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    (metrics,) = trainer.validate(module, loader_of(CASE), verbose=False)
    logits = module.logits(TOKENS)
    assert torch.equal(module({"input_ids": TOKENS, "labels": TOKENS}), logits)
    return {
        "logits": logits,
        "val_loss": metrics["val_loss"],
        "hparams": dict(module.hparams),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    return run_ranks(_train_and_save, 4, str(folder))[0]  # type: ignore[no-any-return]


def _load_without_trainer(folder: str) -> dict[str, Any]:
    from lightning.fabric.plugins.environments import LightningEnvironment

    from lightning_megatron import MegatronModule
    from lightning_megatron.run.check import check_world_size

    module = MegatronModule.load_from_checkpoint(folder)  # loads the newest checkpoint
    sequences = module.generate(TOKENS)
    message = refusal(check_world_size, LightningEnvironment(), 2, 1)
    assert "expected 2 ranks for the run, got 1" in message
    return {
        "logits": module(TOKENS),
        "sequences": sequences,
        "hparams": dict(module.hparams),
        "options": module.generation,
    }


def test_loaded_module_infers_without_trainer_like_saved_one(
    folder: Path, saved: dict[str, Any]
) -> None:
    (loaded,) = run_ranks(_load_without_trainer, 1, str(folder))
    # fp32 rounding: the summation order differs between four ranks and one process.
    torch.testing.assert_close(
        loaded["logits"],
        saved["logits"],
        rtol=0,
        atol=2e-5,
    )
    first_generated = saved["logits"][:, -1].argmax(-1)
    assert loaded["sequences"][:, 12].tolist() == first_generated.tolist()
    assert loaded["options"].eos_token_id == (7, 8)
    expected = dict(saved["hparams"])
    del expected["size"]
    del expected["kinds"]
    assert loaded["hparams"] == expected


def test_hyperparameters_are_in_loggers_and_checkpoints(
    folder: Path, saved: dict[str, Any]
) -> None:
    meta = torch.load(folder / "run.ckpt" / "meta.pt", weights_only=True)
    hparams = meta["lightning"]["hyper_parameters"]
    assert json.loads(json.dumps(hparams)) == json.loads(json.dumps(saved["hparams"]))
    assert hparams["train_step"] == "gpt"
    assert hparams["task"] == "causal_lm"
    assert hparams["optimizer"]["multipliers"] == {
        "*word_embeddings*": {"lr_mult": 0.5, "wd_mult": None}
    }
    assert hparams["lr_schedule"]["style"] == "cosine"
    # Plain numbers and strings, not enum classes that a reader would have to import.
    assert type(hparams["size"]) is int
    ((key, kinds),) = hparams["kinds"].items()
    assert {type(each) for each in (key, *kinds)} == {str}
    (logged,) = folder.rglob("hparams.yaml")
    assert "warmup_steps: 1" in logged.read_text()


def _load_and_train(
    case: Case, folder: str, overrides: dict[str, Any]
) -> tuple[float, float, float]:
    from lightning_megatron import MegatronModule

    module = MegatronModule.load_from_checkpoint(f"{folder}/run.ckpt", **overrides)
    trainer = trainer_of(case)
    (metrics,) = trainer.validate(module, loader_of(case), verbose=False)
    trainer.fit(module, loader_of(case))
    return metrics["val_loss"], module.hparams["lr"], metrics_of(trainer)["lr"]


def test_loaded_module_trains_at_another_layout(folder: Path, saved: dict[str, Any]) -> None:
    case = Case(layout=TP2, steps=2)
    overrides = {"lr": 5e-3, "lr_schedule": {}}
    val_loss, lr, last_lr = common_result(_load_and_train, case, str(folder), overrides)
    assert val_loss == pytest.approx(saved["val_loss"], rel=1.5e-6)
    assert (lr, last_lr) == (5e-3, pytest.approx(5e-3))


def _refusals(folder: str) -> list[str]:
    from lightning_megatron import GPTTrainStep, MegatronModule

    class Weighted(GPTTrainStep):
        pass

    path = f"{folder}/run.ckpt"
    load = MegatronModule.load_from_checkpoint
    messages = [
        refusal(load, path, lr="3e-4"),
        refusal(load, path, optimizer={"beta3": 1}),
    ]
    meta = torch.load(f"{path}/meta.pt", weights_only=True)
    meta["lightning"]["hyper_parameters"] = dict(_module(train_step=Weighted()).hparams)
    torch.save(meta, f"{path}/meta.pt")
    load(path, train_step=Weighted())
    return [*messages, refusal(load, path)]


def test_wrong_arguments_are_refused_in_one_line(folder: Path, saved: dict[str, Any]) -> None:
    number, option, step = run_ranks(_refusals, 1, str(folder))[0]
    assert "lr='3e-4' must be a number, and is a str" in number
    assert "OptimizerOptions has no option 'beta3'; did you mean beta2" in option
    assert re.search(r"train_step=.*Weighted of .* is only a name; use load_from_checkpoint", step)
