"""Does docs/from_accelerate.md show the table of names, and do its blocks run? As a program this writes the tables."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.foreign_names import ForeignName, foreign_names
from tests.cli.corpus import VOCAB_SIZE, make_corpus
from tests.cli.test_config_command import OLD
from tests.cli.test_training import run_cli
from tests.ranks import ROOT, run_ranks

PAGE = ROOT / "docs/from_accelerate.md"
TABLES = {
    "api": "Accelerate's classes and functions",
    "plugin": "Accelerate's `MegatronLMPlugin`, and `megatron_lm_*` in its file",
    "config": "The other keys of Accelerate's file, and options of `accelerate launch`",
    "loaders": "`MegatronLMDummyDataLoader` and `MegatronLMDummyScheduler`",
    "generate": "`megatron_generate`, and Megatron-LM's text generation",
    "nemo": "NeMo 2's `MegatronStrategy` and data modules",
    "megatron": "Megatron-LM's command line",
    "transformers": "transformers' `generate` and `TrainingArguments`",
}


def _row(row: ForeignName, tool: str) -> str:
    theirs = f"--{row.theirs.replace('_', '-')}" if tool == "megatron" else row.theirs
    ours = f"`{row.ours.replace(')', '=)')}`" if row.ours else ""
    return f"| `{theirs}` | {ours} | {row.note} |"


def tables() -> str:
    """All tables as Markdown."""
    parts = []
    for tool, title in TABLES.items():
        rows = [_row(row, tool) for row in foreign_names() if tool in row.used_by.split()]
        parts.append("\n".join([f"## {title}", "", "| there | here | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_tables_are_those_that_the_package_reads() -> None:
    assert PAGE.read_text().endswith(f"\n{tables()}"), "run python -m tests.test_docs_from_accelerate"
    assert {tool for row in foreign_names() for tool in row.used_by.split()} == {*TABLES, "removed"}


def test_every_field_of_the_plugin_is_there() -> None:
    fields = pytest.importorskip("accelerate.utils").MegatronLMPlugin.__dataclass_fields__
    assert set(fields) <= {row.theirs for row in foreign_names() if row.used_by == "plugin"}


def test_every_key_of_the_file_is_there() -> None:
    fields = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig.__dataclass_fields__
    assert set(fields) <= {row.theirs for row in foreign_names() if row.used_by == "config"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: with a dataset, the folder of a GPT-2, and what ``accelerate config`` wrote."""
    folder = tmp_path_factory.mktemp("docs")
    make_corpus(folder)
    (folder / "gpt2").mkdir()
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": VOCAB_SIZE}
    (folder / "gpt2/config.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    (folder / "default_config.yaml").write_text(yaml.safe_dump(OLD))
    return folder


def test_the_commands_make_a_configuration_that_fit_takes(folder: Path) -> None:
    (block,) = _blocks("bash")
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "lightning-megatron"
        code, printed, error = run_cli(folder, *arguments)
        assert code == 0, error
    assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["num_microbatches"] == 2


def _run(folder: str, program: str, own_objective: str) -> tuple[int, float]:
    from lightning.pytorch import Trainer, seed_everything

    from lightning_megatron import MegatronModule, MegatronStrategy

    os.chdir(folder)
    quiet = "max_steps=4, logger=False, enable_progress_bar=False"
    assert program.count("max_steps=4,") == 1
    variables: dict[str, Any] = {}
    exec(compile(program.replace("max_steps=4,", f"{quiet},"), str(PAGE), "exec"), variables)
    exec(compile(own_objective, str(PAGE), "exec"), variables)
    losses = []
    for module in (variables["module"], MegatronModule(model="gpt2")):
        seed_everything(1)
        trainer = Trainer(
            accelerator="cpu", devices=4, strategy=MegatronStrategy(tp=2, pp=2), logger=False, limit_val_batches=1
        )
        losses.append(trainer.validate(module, variables["data"], verbose=False)[0]["val_loss"])
    return int(variables["trainer"].global_step), losses[0] / losses[1]


def test_the_programs_train_save_and_have_an_objective_of_their_own(folder: Path) -> None:
    assert run_ranks(_run, 4, str(folder), *_blocks("python")) == [(4, pytest.approx(0.5))] * 4
    assert (folder / "out.ckpt").is_dir()


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(f"## {TABLES['api']}")] + tables())
