"""Every file in configs/ can be instantiated by the command line."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.models.layout import check_layout
from tests.cli.command import instantiate
from tests.ranks import ROOT, run_ranks

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def _instantiate(config: str, overrides: list[str]) -> dict[str, Any]:
    cli = instantiate(".", "--config", config, *overrides)
    strategy = cli.trainer.strategy
    model = cli.model.model_config
    check_layout(model, strategy.parallel)
    strategy.parallel.check_sequence(cli.datamodule.seq_length, model.max_position_embeddings)
    return {
        "world_size": strategy.num_nodes * strategy.num_processes,
        "data_parallel_size": strategy.data_parallel_size,
        "callbacks": {type(callback).__name__ for callback in cli.trainer.callbacks},
        "loggers": {type(logger).__name__ for logger in cli.trainer.loggers},
    }


def _with_model_directory(
    fields: dict[str, Any],
    tokenizer: Path,
    folder: Path,
) -> list[str]:
    """Overrides for configs that start from a model directory: one with a tokenizer and a default config."""
    model = fields["model"]["init_args"]
    step = model.get("train_step")
    if isinstance(step, dict) and "teacher" in step["init_args"]:
        from transformers import LlamaConfig

        LlamaConfig(vocab_size=model["model"]["vocab_size"]).save_pretrained(folder / "teacher")
        return ["--model.train_step.init_args.teacher", str(folder / "teacher")]
    if not isinstance(fields["model"]["init_args"]["model"], str):
        return []
    from transformers import LlamaConfig, MegatronBertConfig

    config_class = LlamaConfig
    if "bert" in fields["model"]["init_args"]["model"]:
        config_class = MegatronBertConfig
    directory = shutil.copytree(tokenizer, folder / "model")
    config_class().save_pretrained(directory)
    # The directory has no weights.
    return [
        "--model.model",
        str(directory),
        "--model.pretrained",
        "false",
        "--data.tokenizer",
        str(directory),
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_is_valid_and_its_layout_fits_the_model(
    config: Path, corpus: Path, tmp_path: Path
) -> None:
    fields = yaml.safe_load(config.read_text())
    (made,) = run_ranks(
        _instantiate,
        1,
        str(config),
        _with_model_directory(fields, corpus.parent / "tok", tmp_path),
    )
    trainer = fields["trainer"]
    layout = trainer["strategy"]["init_args"]
    assert made["world_size"] == trainer["devices"]
    assert (
        made["data_parallel_size"] * layout.get("tp", 1) * layout.get("pp", 1) == trainer["devices"]
    )
    assert {each["class_path"].rsplit(".", 1)[-1] for each in trainer["callbacks"]} <= made[
        "callbacks"
    ]
    assert {each["class_path"].rsplit(".", 1)[-1] for each in trainer["logger"]} == made["loggers"]


def test_quickstart_learning_rate_decays_until_its_last_step() -> None:
    fields = yaml.safe_load((ROOT / "configs" / "gpt2_tiny_cpu.yaml").read_text())
    decay_steps = fields["model"]["init_args"]["lr_schedule"]["decay_steps"]
    assert f'"--trainer.max_steps", "{decay_steps}"' in (ROOT / "noxfile.py").read_text()
