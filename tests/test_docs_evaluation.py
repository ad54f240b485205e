"""docs/evaluation.md: every block of code is run, as a reader would run it, on a small model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, run_ranks

PAGE = (ROOT / "docs/evaluation.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
METRICS = {"perplexity": ("test_loss", "test_perplexity"), "last_word": ("test_last_word_accuracy", "test_loss")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: a folder with the model ``gpt2``, the configs, and the texts of the page."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.unit.data.chat_tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("evaluation")
    config = GPT2Config(vocab_size=311, n_layer=2, n_head=2, n_embd=16, n_positions=128, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    make_tokenizer(folder / "gpt2")
    shutil.copytree(ROOT / "configs", folder / "configs")
    _in_folder(folder, PYTHON[0])
    return folder


def _in_folder(folder: Path, code: str) -> None:
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, "evaluation.md", "exec"), {})
    finally:
        os.chdir(here)


@pytest.mark.parametrize("command", COMMANDS, ids=["perplexity", "last_word"])
def test_the_commands_print_what_the_page_says(
    folder: Path, command: list[str], request: pytest.FixtureRequest
) -> None:
    assert command[0] == "lightning-megatron"
    lines = [json.loads(line)["text"] for line in (folder / "lines.jsonl").read_text().splitlines()]
    assert min(len(line.split()) for line in lines) == 4
    code, out, err = run_ranks(_command, 2, str(folder), [*command[1:], "--trainer.limit_test_batches", "2"])[0]
    assert code == 0, err
    for metric in METRICS[request.node.callspec.id]:
        assert metric in out


def _command(folder: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run a command as one of torchrun's processes; exit code, stdout and stderr."""
    from lightning_megatron.cli import main

    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def _run_code(code: str, folder: str) -> list[tuple[int, ...]]:
    import torch

    os.chdir(folder)
    assert "Trainer(" in code
    quiet = "enable_progress_bar=False, enable_checkpointing=False, logger=False"
    dataset = [{"input_ids": torch.full((5,), number)} for number in range(7)]
    variables: dict[str, Any] = {"dataset": dataset}
    exec(compile(code.replace("logger=False", quiet), "evaluation.md", "exec"), variables)
    own = sum(len(batch) for batch in variables["predictions"])
    assert own in (3, 4)
    expected = [variables["module"].logits(row["input_ids"][None])[0] for row in dataset]
    for logits, again in zip(variables["logits"], expected, strict=True):
        # Other rows beside it, and so other kernels.
        torch.testing.assert_close(logits, again, rtol=0.0, atol=1e-5)
    return [tuple(logits.shape) for logits in variables["logits"]]


def test_the_python_gives_the_logits_of_every_sample(folder: Path) -> None:
    assert run_ranks(_run_code, 4, PYTHON[1], str(folder)) == [[(5, 311)] * 7] * 4
