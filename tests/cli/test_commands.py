"""Do the commands answer help at once, and say one line about wrong arguments?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from lightning_megatron.cli import main, program
from tests.ranks import ROOT
from tests.unit.data.indexed_files import write_legacy

COMMANDS = (
    *("fit", "validate", "test", "predict"),
    *("train-tokenizer", "preprocess", "convert-dataset", "merge", "inspect", "convert", "generate", "config"),
    "doctor",
)


def _run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lightning_megatron", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done, time.monotonic() - started


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda words: " ".join(words) or "none")
def test_help_answers_in_under_three_seconds(command: tuple[str, ...]) -> None:
    done, seconds = _run(*command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: lightning-megatron")
    assert done.stderr == ""
    assert seconds < 3


def test_help_lists_every_command_and_nothing_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n    {name} " not in text and f"\n    {name}\n" not in text] == []
    assert "export" not in text


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_trainer_commands_names_what_others_rely_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--config", "--trainer.", "--model.", "--data.", "--ckpt_path", "--print_config", "--help-all"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: the following arguments are required: COMMAND; see lightning-megatron --help\n"),
        (["fti"], "error: argument COMMAND: invalid choice: 'fti'"),
        (["doctor", "--verbose"], "error: unrecognized arguments: --verbose; see lightning-megatron doctor --help\n"),
        (
            ["train-tokenizer", "--input", "x", "--output", "y"],
            "error: the following arguments are required: --vocab-size; see lightning-megatron train-tokenizer",
        ),
        (
            ["preprocess", "--input", "x", "--output-prefix", "p", "--tokenizer", "t", "--workers", "many"],
            "error: argument --workers: invalid int value: 'many'; see lightning-megatron preprocess --help\n",
        ),
        (
            ["preprocess", "--input", "x", "--output-prefix", "p", "--tokenizer", "t", "--workers", "0"],
            "error: --workers 0 must be at least 1",
        ),
        (
            ["preprocess", "--input", "x", "--output-prefix", "p", "--tokenizer", "t", "--dataset-impl", "lazy"],
            "error: unrecognized arguments: --dataset-impl lazy; see lightning-megatron preprocess",
        ),
        (["convert-dataset", "--input", "x"], "error: the following arguments are required: --output-prefix; see"),
        (
            ["convert-dataset", "--input", "nowhere", "--output-prefix", "y"],
            "error: --input nowhere needs two files, missing: nowhere.idx, nowhere.bin",
        ),
        (
            ["train-tokenizer", "--input", "nowhere", "--vocab-size", "300", "--output", "y"],
            "error: nowhere does not exist",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_arguments_are_one_line_and_exit_code_two(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_one_line_and_what_shells_expect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_megatron.cli.doctor.report_installation", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_trainer_that_was_interrupted_is_one_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> str:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)  # lightning 2.6, pytorch/trainer/call.py

    monkeypatch.setattr("lightning_megatron.cli.doctor.report_installation", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_output_that_nobody_reads_ends_the_command_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise BrokenPipeError

    monkeypatch.setattr("lightning_megatron.cli.doctor.report_installation", broken)
    end, beginning = os.pipe()
    with open(beginning, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):  # another pipe's: a defect
            main(["doctor"])
        os.close(end)
        assert main(["doctor"]) == 141
        output.write("to nowhere")
    assert capsys.readouterr().err == ""


def test_an_interrupted_import_of_torch_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[program.__module__], "main", lambda: 130)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("half_imported"))
    monkeypatch.setitem(sys.modules, "torch", None)  # cannot be imported
    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 130


def test_tokenizer_and_dataset_can_be_read_back(corpus: Path) -> None:
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # the engine's own reader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "tok")
    dataset = IndexedDataset(str(corpus))
    assert len(dataset) == 60
    tokens = dataset[3]
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(numpy.asarray(tokens[:-1])) == (corpus.parent / "text" / "03.txt").read_text()


@pytest.mark.parametrize("command", ["convert-dataset", "merge"])
def test_help_of_dataset_commands_names_the_formats(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for word in ("mmap", "cached", "lazy", "--output-prefix"):
        assert word in text


def test_a_legacy_dataset_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    from megatron.core.datasets.indexed_dataset import IndexedDataset  # the engine's own reader

    from lightning_megatron import IndexedDataModule
    from lightning_megatron.data.loader import BatchShape
    from lightning_megatron.datamodules.base import Run
    from lightning_megatron.errors import DataError

    shape = BatchShape(micro_batch_size=1, num_microbatches=1, data_parallel_size=1, data_parallel_rank=0)
    expected = IndexedDataset(str(corpus))
    prefix = tmp_path / "a b" / "old"
    prefix.parent.mkdir()
    write_legacy(prefix, [[expected[number].tolist()] for number in range(len(expected))])
    data = IndexedDataModule(data_path=str(prefix), seq_length=8, micro_batch_size=1)
    with pytest.raises(DataError, match="old cached/lazy format") as refused:
        data.check(Run(shape=shape))

    program, *arguments = shlex.split(str(refused.value).split("run: ")[1])
    capsys.readouterr()
    assert program == "lightning-megatron"
    assert main(arguments) == 0
    converted = f"{prefix}_mmap"
    assert capsys.readouterr().out.startswith(f"{converted}: 60 documents, 60 sequences, ")
    read = IndexedDataset(converted)
    assert [read[i].tolist() for i in range(len(read))] == [expected[i].tolist() for i in range(len(expected))]
    assert main(arguments) == 2
    assert "would overwrite" in capsys.readouterr().err


def test_doctor_shows_versions_devices_slots_and_what_is_optional(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from lightning_megatron.engine.fillers.choice import slot_report

    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"{'torch'.ljust(18)}  {torch.__version__}" in text
    for line in slot_report("cuda" if torch.cuda.is_available() else "cpu"):
        (row,) = [row for row in text.splitlines() if row.startswith(f"{line.slot} ")]
        assert line.filler in row
        assert line.reason in row
    for optional in ("liger-kernel", "Transformer Engine", "NVIDIA Apex"):
        assert f"\n{optional} " in text
    assert "apex on PyPI is another" in text
    (extra,) = [row for row in text.splitlines() if row.startswith("data ")]
    assert "orjson 3." in extra
    assert "pip install 'lightning-megatron[data]'" in extra


def test_doctor_tells_what_is_not_installed_from_what_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_megatron.cli.doctor import _state

    (tmp_path / "half_installed.py").write_text("raise OSError('libcudart.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    states = {name: _state(name, lambda: False) for name in ("half_installed", "not_there")}
    assert states == {"half_installed": "installed, but not usable", "not_there": "not installed"}


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import lightning_megatron

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"lightning-megatron {lightning_megatron.__version__}\n"
