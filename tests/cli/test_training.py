"""``fit`` and ``validate``: output, saved configuration, accepted classes, and help."""

from pathlib import Path

import yaml

from tests.cli.command import run_cli
from tests.cli.corpus import configuration


def test_fit_shows_progress_and_saves_its_configuration(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(configuration(corpus, tmp_path)))
    options = ("--trainer.max_steps", "4", "--trainer.enable_progress_bar", "true")
    code, out, err = run_cli(tmp_path, "fit", "--config", "config.yaml", *options)
    assert code == 0, err
    # Lightning's messages are shown in order.
    assert (
        err.index("Seed set to 1234")
        < err.index("GPU available")
        < err.index("`max_steps=4` reached.")
    )
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 1/4", "step 4/4"]
    assert lines[0].count("train_loss") == 1
    assert "val_loss" in lines[-1]
    assert "\r" not in out
    (saved,) = tmp_path.rglob("version_0/config.yaml")
    used = yaml.safe_load(saved.read_text())
    assert (used["trainer"]["max_steps"], used["seed_everything"]) == (4, 1234)
    own = (tmp_path / "config.yaml").read_text()
    code, out, err = run_cli(
        tmp_path, "validate", "--config", "config.yaml", "--trainer.logger", "false"
    )
    assert code == 0, err
    assert "val_loss" in out
    # Without a logger the configuration is saved beside the user's file, which stays as it is.
    assert (tmp_path / "config.yaml").read_text() == own
    assert yaml.safe_load((tmp_path / "run_config.yaml").read_text())["trainer"]["logger"] is False


def test_fit_accepts_any_lightning_and_data_module(tmp_path: Path) -> None:
    boring = "lightning.pytorch.demos.boring_classes.Boring"
    options = f"--model {boring}Model --data {boring}DataModule --trainer.max_steps 1 --trainer.logger false"
    quiet = "--trainer.accelerator cpu --trainer.devices 1 --trainer.enable_progress_bar false"
    code, _, err = run_cli(
        tmp_path,
        "fit",
        *options.split(),
        *quiet.split(),
    )
    assert code == 0, err


def test_help_all_describes_options_of_trainer_and_package(tmp_path: Path) -> None:
    code, out, err = run_cli(tmp_path, "fit", "--help-all")
    assert code == 0, err
    for option in (
        "trainer.max_steps",
        "model.lr_schedule.style",
        "trainer.strategy.num_microbatches",
        "data.split",
    ):
        assert f"\n  --{option} " in out
    words = " ".join(out.split())
    assert "Optimizer steps of the linear warm-up from" in words
    assert "Peak learning rate." in words
