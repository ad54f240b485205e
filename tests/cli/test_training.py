"""``fit`` and the others: what LightningCLI accepts, and one line for what it does not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import run_all, run_cli
from tests.cli.corpus import VOCAB_SIZE


def configuration(corpus: Path, folder: Path) -> dict[str, Any]:
    """A complete configuration for one process."""
    shape = {"vocab_size": VOCAB_SIZE, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    data = {"data_path": str(corpus), "split": "90,10,0", "seq_length": 32, "micro_batch_size": 2}
    trainer = {
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}},
        "strategy": {"class_path": "MegatronStrategy", "init_args": {"num_microbatches": 2}},
        **{"accelerator": "cpu", "devices": 1, "max_steps": 2, "limit_val_batches": 1, "enable_progress_bar": False},
    }
    return {
        "trainer": trainer,
        "model": {"class_path": "MegatronModule", "init_args": {"model": {"model_type": "gpt2", **shape}}},
        "data": {"class_path": "IndexedDataModule", "init_args": data},
    }


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(configuration(corpus, tmp_path)))
    return path


def test_fit_trains_from_a_file_shows_its_progress_and_saves_the_configuration(config: Path, tmp_path: Path) -> None:
    options = ("--trainer.max_steps", "4", "--trainer.enable_progress_bar", "true")
    code, out, err = run_cli(tmp_path, "fit", "--config", str(config), *options)
    assert code == 0, err
    # What Lightning says is shown, in order, when nothing is wrong.
    assert err.index("Seed set to 1234") < err.index("GPU available") < err.index("`max_steps=4` reached.")
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 1/4", "step 4/4"]
    assert lines[0].count("train_loss") == 1
    assert "val_loss" in lines[-1]
    assert "\r" not in out
    (saved,) = tmp_path.rglob("version_0/config.yaml")
    used = yaml.safe_load(saved.read_text())
    assert (used["trainer"]["max_steps"], used["seed_everything"]) == (4, 1234)
    code, out, err = run_cli(tmp_path, "validate", "--config", str(config))
    assert code == 0, err
    assert "val_loss" in out


def test_any_lightning_module_and_data_module_are_accepted(tmp_path: Path) -> None:
    code, _, err = run_cli(
        tmp_path,
        *("fit", "--model", "lightning.pytorch.demos.boring_classes.BoringModel", "--trainer.accelerator", "cpu"),
        *("--data", "lightning.pytorch.demos.boring_classes.BoringDataModule", "--trainer.max_steps", "1"),
        *("--trainer.logger", "false", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"),
    )
    assert code == 0, err


MISTAKES = (
    ("--trainer.max_stepps", "3", "max_stepps 3; did you mean --trainer.max_steps?"),
    ("--modle.lrr", "3", "did you mean --model?"),
    ("--trainer.max_steps", "many", "trainer.max_steps: Expected a <class 'int'>. Got value: many"),
    ("--trainer.strategy.tp_degree", "3", "Option 'tp_degree' is not accepted; here it is --trainer.strategy.tp"),
    ("--trainer.strategy.tpp", "3", "Option 'tpp' is not accepted; did you mean tp?"),
    ("--model.optimizer.beta9", "3", "did you mean optimizer.beta2?"),
    ("--model", "MegatronModul", "did you mean MegatronModule?"),
    ("--trainer.precision", "fp16", "expected one of 32-true, bf16-mixed, bf16-true, 16-mixed"),
    ("--trainer.accelerator", "tpu", "torch_xla"),
    ("--trainer.logger", "MLFlowLogger", "MLFlowLogger: expected the package 'mlflow>=1.0.0', got none; pip install"),
    ("--trainer.logger.save_dir", "/dev/null/x", "saved in /dev/null/x: /dev/null is no folder"),
    ("--trainer.strategy", "megatron_tp3_pp1", "expected MegatronStrategy, megatron, megatron_tpN"),
    ("--trainer.accumulate_grad_batches", "2", "accumulate_grad_batches=2 does not work, a batch is a whole step"),
    ("--model.optimizer.weight_decay", "-1", "weight_decay=-1.0 must be at least 0"),
    ("--model.model", "nowhere/config.json", "nowhere/config.json does not exist"),
    ("--data.data_path", "nowhere", "nowhere"),
    ("--ckpt_path", "nowhere.ckpt", "ckpt_path=nowhere.ckpt does not exist"),
    ("--ckpt_path", "/dev/../etc/passwd", "expected a checkpoint, which is a folder, got another file"),
    ("--trainer.strategy", "ddp", "MegatronModule runs on DDPStrategy; use MegatronStrategy(...)"),
    ("--ckpt_path", "best", "ckpt_path=best: expected a ModelCheckpoint of this Trainer that has saved, got none"),
    ("--ckpt_path", "/proc", "checkpoint /proc lacks its file meta.pt"),
    ("--trainer.val_check_interval", "0", "val_check_interval=0: expected steps or a share of an epoch"),
    ("--trainer.devices", "many", "devices=many: expected a number of processes from 1 on"),
    ("--trainer.devices", "-1", "devices=-1: expected a number of processes from 1 on"),
    ("--trainer.strategy.recompute", "some", "\"recompute\": expected one of 'selective', 'full'\n"),
    ("--config", "nowhere.yaml", "nowhere.yaml"),
)


def _assert_one_line(results: list[tuple[int, str, str]], expected: Iterable[str]) -> None:
    for (code, out, err), line in zip(results, expected, strict=True):
        assert (code, out) == (2, ""), err
        assert line in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert err.rstrip("\n").isprintable()


def test_a_users_mistake_is_one_line_exit_code_two_and_leaves_no_file(config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    fit = ("fit", "--config", config)
    results = run_all(tmp_path, [(*fit, option, value) for option, value, _ in MISTAKES])
    _assert_one_line(results, [line for *_, line in MISTAKES])
    assert sorted(tmp_path.rglob("*")) == before


def test_what_stands_alone_or_is_missing_is_told_with_the_option(tmp_path: Path) -> None:
    import torch

    cases = {
        "fit other.yaml": "did you mean --config other.yaml?",
        "fit": "give --config FILE, or model and data as options: see --help",
    }
    if not torch.cuda.is_available():
        boring = "--model lightning.pytorch.demos.boring_classes.BoringModel --data DatasetDataModule --data.train x"
        says = "error: accelerator=gpu: expected a GPU that torch can use, got none; give accelerator=cpu"
        cases[f"fit {boring} --data.micro_batch_size 1 --trainer.accelerator gpu"] = says
    _assert_one_line(run_all(tmp_path, map(str.split, cases)), cases.values())


_ALIASES = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


FILES = (
    ("trainer:\n\tmax_steps: 3", "bad.yaml:2: Problems parsing config: while scanning for the next token found"),
    ("trainer:\n  max_stepps: 3", "bad.yaml:2: Subcommand 'fit' does not accept option 'trainer.max_stepps'; did"),
    ("data:\n  class_path: IndexedDataModule\n  init_args:\n    seq_len: 3", "bad.yaml:4: data: Problem with"),
    ("trainer:\n  max_steps: many", "bad.yaml:2: trainer.max_steps: Expected a <class 'int'>. Got value: many"),
    (
        'trainer:\n  max_steps: "\\e]0;mine\\a"',
        r"bad.yaml:2: trainer.max_steps: Expected a <class 'int'>. Got value: \x1b]0",
    ),
    ("trainer.max_steps", "bad.yaml:1: Unexpected config: trainer.max_steps"),
    (_ALIASES, "bad.yaml: expected at most 100,000 values, 100 in each other, got more"),
    ("trainer: &a {logger: *a}", "bad.yaml: expected at most 100,000 values, 100 in each other, got more"),
    (f"trainer: {'[' * 5000}{']' * 5000}", "bad.yaml: expected at most 100,000 values, 100 in each other, got"),
    (f"trainer: {'9' * 5000}", "value has 5000 digits"),
    ("trainer: \xff", "bad.yaml is no text in UTF-8"),
)


def test_a_mistake_in_a_file_is_one_line_with_the_file_and_the_line(config: Path, tmp_path: Path) -> None:
    commands = []
    for number, (text, _) in enumerate(FILES):
        file = tmp_path / str(number) / "bad.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="latin-1")
        commands.append(("fit", "--config", config, f"--config={number}/bad.yaml"))
    _assert_one_line(run_all(tmp_path, commands), [expected for _, expected in FILES])


def test_help_all_has_the_options_of_trainer_and_of_our_classes_and_what_their_fields_mean(tmp_path: Path) -> None:
    code, out, err = run_cli(tmp_path, "fit", "--help-all")
    assert code == 0, err
    for option in (
        *("--trainer.max_steps", "--model.lr_schedule.style", "--trainer.strategy.num_microbatches"),
        *("--data.seq_length", "--data.split"),
    ):
        assert f"\n  {option} " in out
    words = " ".join(out.split())
    assert "Optimizer steps of the linear warm-up from" in words
    assert "Peak learning rate." in words
