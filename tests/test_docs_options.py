"""docs/options.md is what the docstrings of the options say. As a program this writes the page."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from tests.cli.test_training import run_cli
from tests.ranks import ROOT

PAGE = ROOT / "docs/options.md"
INTRODUCTION = """# Options that are objects

In Python they are given as objects, in YAML as the fields of a mapping, on the command line with a dot:

| option of | field | on the command line |
|---|---|---|
| `MegatronModule` | `optimizer=OptimizerOptions(...)` | `--model.optimizer.beta2 0.95` |
| `MegatronModule` | `lr_schedule=LRSchedule(...)` | `--model.lr_schedule.style cosine` |
| `MegatronModule` | `train_step=` a subclass of `TrainStep` | `--model.train_step my_module.MyStep` |
| `MegatronStrategy` | `load_from=LoadFrom(...)` | `--trainer.strategy.load_from.path runs/a` |
| `IndexedDataModule` | `masking=MaskingOptions(...)` | `--data.masking.probability 0.2` |

`lightning-megatron fit --model.help MegatronModule` shows them with all others, `help(LRSchedule)` in Python too.
The tables are made from the docstrings: `python -m tests.test_docs_options`.
"""


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def _table(kind: type) -> str:
    from docstring_parser import DocstringStyle, parse

    described = {
        param.arg_name: param.description or "" for param in parse(kind.__doc__ or "", DocstringStyle.GOOGLE).params
    }
    options = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    assert described.keys() == options.keys(), kind
    texts = {name: " ".join(text.split()).replace("``", "`").replace("|", r"\|") for name, text in described.items()}
    rows = [f"| `{name}` | {_default(options[name])} | {text} |" for name, text in texts.items()]
    return "\n".join(["| field | default | |", "|---|---|---|", *rows])


def page() -> str:
    """The whole page as Markdown."""
    from lightning_megatron import LoadFrom, LRSchedule, MaskingOptions, OptimizerOptions, TrainStep

    parts = [INTRODUCTION]
    for kind in (OptimizerOptions, LRSchedule, LoadFrom, MaskingOptions):
        summary = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
        parts.append(f"## {kind.__name__}\n\n{summary}\n\n{_table(kind)}\n")
    methods = {
        name: inspect.cleandoc(method.__doc__ or "").splitlines()[0].replace("``", "`")
        for name, method in vars(TrainStep).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    summary = inspect.cleandoc(TrainStep.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    needed = {name: "yes" if name in TrainStep.__abstractmethods__ else "" for name in methods}
    rows = [f"| `{name}` | {needed[name]} | {text} |" for name, text in methods.items()]
    table = "\n".join(["| method | has to be written | |", "|---|---|---|", *rows])
    parts.append(
        f"## TrainStep\n\n{summary} [An example](../examples/custom_train_step.py). A subclass names its losses in "
        f"`loss_terms`.\n\n{table}\n"
    )
    return "\n".join(parts)


def test_the_page_says_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.test_docs_options"


def test_the_command_line_takes_them_and_its_configuration_can_be_read_again(tmp_path: Path) -> None:
    options = [word for line in re.findall(r"`(--[^`]+)` \|", INTRODUCTION) for word in shlex.split(line)]
    options[options.index("my_module.MyStep")] = "lightning_megatron.T5TrainStep"
    data = ["--data", "IndexedDataModule", "--data.data_path", "x", "--data.seq_length", "8"]
    first = ["--model.model", "t5", "--trainer.strategy", "MegatronStrategy", *data, "--data.micro_batch_size", "1"]
    code, printed, err = run_cli(tmp_path, "fit", *first, *options, "--print_config")
    assert code == 0, err
    (tmp_path / "again.yaml").write_text(printed)
    code, again, err = run_cli(tmp_path, "fit", "--config", str(tmp_path / "again.yaml"), "--print_config")
    assert (code, again) == (0, printed), err
    made = yaml.safe_load(again)
    assert made["model"]["init_args"]["optimizer"]["beta2"] == 0.95
    assert made["trainer"]["strategy"]["init_args"]["load_from"]["path"] == "runs/a"
    assert made["data"]["init_args"]["masking"]["probability"] == 0.2


if __name__ == "__main__":
    PAGE.write_text(page())
