"""Each recipe runs from text to an exported model, with a tiny model."""

import contextlib
import io
import json
import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes import complete, pages, run, text
from tests.ranks import run_ranks

FROM_SCRATCH = {"gpt2_small", "llama_1b_fp8", "experts_8_layers", "t5", "packed_chats"}
"""Recipes whose first loss is that of guessing among the vocabulary."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the recipes share: text, tokenizers and datasets are made once."""
    return tmp_path_factory.mktemp("recipes")


def _execute(words: Sequence[str], log: Path) -> int:
    """Run a command in this process; another would spend eight seconds on imports."""
    from lightning_megatron.cli import main

    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            return main(list(words))
        except SystemExit as end:
            return int(end.code or 0)
        except Exception:
            traceback.print_exc(file=file)
            return 1


def _run(
    name: str,
    work: Path,
    output: Path,
) -> tuple[int, dict[str, Any], int | None]:
    """Exit code and figures of a recipe, and the parameters that transformers counts in its export."""
    from transformers import AutoModelForCausalLM

    run.execute = _execute
    run.complete = complete.complete
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run.main([name, "--tiny", "--work", str(work), "--output", str(output)])
    assert code == 0, errors.getvalue()[-3000:]
    figures = json.loads((output / f"{name}.json").read_text())
    counted = None
    if name in ("gpt2_small", "llama_1b_fp8", "experts_8_layers"):
        model = AutoModelForCausalLM.from_pretrained(work / name / "model")
        counted = model.num_parameters()
    return code, figures, counted


@pytest.mark.parametrize("name", run.RECIPES)
def test_recipe_trains_and_exports(name: str, work: Path, tmp_path: Path) -> None:
    ((code, figures, counted),) = run_ranks(
        _run,
        1,
        name,
        work,
        tmp_path,
    )
    assert code == 0
    assert figures["steps"] == 4
    assert len(figures["val_losses"]) == 2
    if name in FROM_SCRATCH:
        assert figures["first_loss"] == pytest.approx(math.log(512), abs=0.5)
    assert [each["command"].split()[1] for each in figures["commands"]][-2:] == ["fit", "convert"]
    exported = figures["export"]
    assert any(file.endswith(".safetensors") for file in exported["files"])
    assert exported["parameters"] > 1000
    if counted is not None:
        assert exported["parameters"] == counted
    assert ("completion" in exported) == (name != "lora_llama_8b")
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", run.RECIPES)
def test_page_has_the_figures_of_its_run(name: str) -> None:
    figures = pages.figures_of(name)
    page = (pages.FOLDER / f"{name}.md").read_text()
    assert page == pages.page(name, figures), "python -m recipes.pages writes it"
    assert f"({name}.md)" in (pages.FOLDER / "README.md").read_text()
    if figures is None:
        assert "Not run yet" in page
        return
    assert figures["recipe"] == name
    assert not figures["tiny"]
    assert f"| last training loss | {figures['last_loss']:.3f} |" in page


def test_chats_ask_about_documented_functions() -> None:
    source = 'def add(a, b=1):\n    """Add two\n    numbers.\n\n    More."""\n\ndef _hidden():\n    """No."""\n'
    source += 'def blank():\n    """ """\n'
    (chat,) = text.chats(source)
    assert [message["content"] for message in chat["messages"]] == [
        "What does add do?",
        "Add two numbers.",
        "How is it called?",
        "add(a, b=1)",
    ]
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"] * 2
    assert list(text.chats("not Python (")) == []


def test_text_is_written_up_to_its_size_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "FILE_BYTES", 100)
    records = [{"text": "x" * 40}] * 50
    assert text.write(records, tmp_path / "text", 0.0005) == 10
    files = sorted((tmp_path / "text").iterdir())
    assert len(files) == 5
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert lines == records[:10]
