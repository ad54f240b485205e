"""docs/checkpoints.md: every block of code is run, as a reader would run it, on a small model."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import ROOT, run_ranks

CHECKPOINTS = (ROOT / "docs/checkpoints.md").read_text()


def _block(text: str, language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return str(block)


def _commands() -> list[list[str]]:
    return [shlex.split(line) for line in _block(CHECKPOINTS, "bash").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: a folder with the Hugging Face model ``gpt2``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("docs")
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=60)).save_pretrained(
        folder / "gpt2"
    )
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What the commands say, one after the other."""
    import contextlib
    import io

    from lightning_megatron.cli.commands import main

    here, output = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output):
            for program, *arguments in _commands():
                assert program == "lightning-megatron"
                assert main(arguments) == 0, arguments
    finally:
        os.chdir(here)
    return output.getvalue()


def test_the_commands_convert_there_and_back(folder: Path, printed: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(folder / "gpt2").state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert json.loads((folder / "exported/config.json").read_text())["dtype"] == "bfloat16"
    assert "query_key_value" in printed


def _run_code(code: str, folder: str) -> tuple[int, int]:
    """Run the Python twice, as a run that is started again; the steps that each made."""
    import torch
    from torch.utils.data import DataLoader

    os.chdir(folder)
    rows = [{name: torch.arange(16) for name in ("input_ids", "labels")} for _ in range(8)]
    steps = []
    for last in (2, 3):
        shorter = code.replace("max_steps=1000", f"max_steps={last}, logger=False, enable_progress_bar=False")
        shorter = shorter.replace("every_n_train_steps=100", "every_n_train_steps=1")
        assert shorter.count("=1,") == 1, "the page no longer shows what this test shortens"
        variables: dict[str, Any] = {"loader": DataLoader(rows, batch_size=4)}  # type: ignore[arg-type]
        exec(compile(shorter, "checkpoints.md", "exec"), variables)
        steps.append(int(variables["trainer"].fit_loop.epoch_loop.batch_progress.total.completed))
    return steps[0], steps[1]


def test_the_python_begins_a_run_and_goes_on_with_it(folder: Path, printed: str) -> None:
    assert (folder / "gpt2.ckpt").is_dir()
    assert run_ranks(_run_code, 2, _block(CHECKPOINTS, "python"), str(folder)) == [(2, 3)] * 2
    assert (folder / "runs/a/last.ckpt").exists()


def test_the_yaml_is_what_the_strategy_takes() -> None:
    from lightning_megatron import LoadFrom, MegatronStrategy

    options = yaml.safe_load(_block(CHECKPOINTS, "yaml"))["trainer"]["strategy"]["init_args"]["load_from"]
    assert MegatronStrategy(load_from=LoadFrom(**options))
