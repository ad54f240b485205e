"""Every file in configs/ is read and instantiated as the command line would."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import instantiate
from tests.ranks import ROOT, run_ranks

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def _instantiate(config: str, overrides: list[str]) -> dict[str, Any]:
    cli = instantiate(".", "--config", config, *overrides)
    strategy, model = cli.trainer.strategy, cli.model.model_config
    strategy.parallel.check_model(model)
    strategy.parallel.check_sequence(cli.datamodule.seq_length, model.max_position_embeddings)
    return {
        "world_size": strategy.num_nodes * strategy.num_processes,
        "data_parallel_size": strategy.data_parallel_size,
        "callbacks": {type(callback).__name__ for callback in cli.trainer.callbacks},
        "loggers": {type(logger).__name__ for logger in cli.trainer.loggers},
    }


def _with_model_directory(fields: dict[str, Any], tokenizer: Path, folder: Path) -> list[str]:
    """Where a config starts from a model's directory: one with a tokenizer and a config of the defaults' shape."""
    if not isinstance(fields["model"]["init_args"]["model"], str):
        return []
    from transformers import LlamaConfig, MegatronBertConfig

    config_class = MegatronBertConfig if "task" in fields["model"]["init_args"] else LlamaConfig
    directory = shutil.copytree(tokenizer, folder / "model")
    config_class().save_pretrained(directory)
    # It has no weights, which would be looked for at once.
    return ["--model.model", str(directory), "--model.pretrained", "false", "--data.tokenizer", str(directory)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_can_be_instantiated_and_its_layout_fits_its_model(config: Path, corpus: Path, tmp_path: Path) -> None:
    fields = yaml.safe_load(config.read_text())
    (made,) = run_ranks(_instantiate, 1, str(config), _with_model_directory(fields, corpus.parent / "tok", tmp_path))
    trainer = fields["trainer"]
    layout = trainer["strategy"]["init_args"]
    assert made["world_size"] == trainer["devices"]
    assert made["data_parallel_size"] * layout.get("tp", 1) * layout.get("pp", 1) == trainer["devices"]
    assert {each["class_path"].rsplit(".", 1)[-1] for each in trainer["callbacks"]} <= made["callbacks"]
    assert {each["class_path"].rsplit(".", 1)[-1] for each in trainer["logger"]} == made["loggers"]


def test_the_learning_rate_of_the_quickstart_decays_to_the_end_of_its_resumed_part() -> None:
    fields = yaml.safe_load((ROOT / "configs" / "gpt2_tiny_cpu.yaml").read_text())
    decay_steps = fields["model"]["init_args"]["lr_schedule"]["decay_steps"]
    assert f'"--trainer.max_steps", "{decay_steps}"' in (ROOT / "noxfile.py").read_text()
