"""Does ``convert`` say in one line what it did, or what is wrong?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_megatron.cli import main
from tests.convert.directories import save_as, tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("models") / "source"
    save_as(tiny_llama(), folder, "sharded_safetensors")
    return folder


def test_one_line_says_what_was_written(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main(["convert", "--load-path", str(source), "--save-path", str(target), "--to", "hf"]) == 0
    shown = capfd.readouterr()
    size = sum(file.stat().st_size for file in target.iterdir()) / 1e6
    assert re.fullmatch(
        rf"{re.escape(str(target))}: Hugging Face model directory \(3 files, {size:.2f} MB\) from Hugging Face model"
        rf" directory {re.escape(str(source))}, in \d+\.\d s \(\d+\.\d\d [MG]B/s\)\n",
        shown.out,
    )
    assert "converting" not in shown.err, "a progress bar, and standard error is no terminal"


@pytest.mark.parametrize("to", ["megatron", "megatron-legacy"])
def test_there_and_back_again(source: Path, tmp_path: Path, to: str) -> None:
    import torch
    from safetensors.torch import load_file

    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    layout = ("--tp", "2", "--pp", "3", "--make-vocab-size-divisible-by", "8")
    assert main(["convert", "--load-path", str(source), "--save-path", there, "--to", to, *layout]) == 0
    assert main(["convert", "--load-path", there, "--save-path", back, "--to", "hf", "--max-shard-size", "20KB"]) == 0
    for name in ("config.json", "generation_config.json"):
        assert (Path(back) / name).read_bytes() == (source / name).read_bytes()
    expected = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    found = {name: t for file in Path(back).glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype for name, tensor in expected.items()
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "the following arguments are required: --load-path, --save-path, --to"),
        ("--load-path {source} --save-path {new} --to onnx", "invalid choice: 'onnx'"),
        ("--load-path {source} --save-path {new} --to hf --tp two", "invalid int value: 'two'"),
        ("--load-path {source} --save-path {new} --to hf --tp 2", "--tp 2 would do nothing with --to hf"),
        ("--load-path {source} --save-path {new} --to megatron --tp 3", "--tp 3 does not divide num_attention_heads=4"),
        ("--load-path {source} --save-path {new} --to hf --dtype int8", "--dtype int8 is not a dtype of weights"),
        ("--load-path {source} --save-path {source} --to hf", "is not empty"),
        ("--load-path {source} --save-path {source}/x --to hf", "lie in each other"),
        ("--load-path {new} --save-path {new}2 --to hf", "does not exist"),
        ("--load-path {source} --save-path /proc/x --to hf", "--save-path /proc/x"),
        ("--load-path {source}/config.json --save-path {new} --to hf", "is a file of another kind"),
        ("--load-path {source} --save-path {new} --to hf --iteration 3", "--iteration 3 would do nothing"),
        ("--load-path {source} --save-path {new} --to hf --nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, says: str
) -> None:
    assert main(["convert", *arguments.format(source=source, new=tmp_path / "new").split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not list(tmp_path.iterdir())


def test_weights_alone_are_said_to_begin_a_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.ckpt"
    assert main(["convert", "--load-path", str(source), "--save-path", str(target), "--to", "megatron"]) == 0
    hint = capsys.readouterr().out.splitlines()[1]
    assert hint == f"It holds weights only: begin a run with MegatronStrategy(load_from={str(target)!r})"


def test_sigterm_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatron.convert.stored.hugging_face import HuggingFaceModel

    def read(*_: object) -> None:
        assert list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(HuggingFaceModel, "read", read)
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["convert", "--load-path", str(source), "--save-path", str(tmp_path / "new"), "--to", "megatron"]
    assert main(arguments) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())


def test_help_imports_nothing_heavy() -> None:
    program = "import sys; from lightning_megatron.cli import main; main(['convert', '--help'])"
    start = time.process_time()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert time.process_time() - start < 3
    assert "--max-shard-size SIZE" in result.stdout
    assert "| torch" not in result.stderr
