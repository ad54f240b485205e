"""Weight files of a model directory: which ones are read, and every damage is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_megatron.convert.hugging_face import open_weights
from lightning_megatron.errors import CheckpointError
from tests.convert.directories import save_as, tiny_gpt2, tiny_llama


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"x": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(open_weights(tmp_path).read("x", (slice(0, 2),)), torch.ones(2))


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_as(tiny_llama(), tmp_path / "model", "sharded_safetensors")
    return tmp_path / "model"


def _refused(directory: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_weights(directory)
    for word in words:
        assert word in str(caught.value)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    _refused(tmp_path / "nowhere", "nowhere", "does not exist")
    _refused(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin", "pretrained=False")


def test_all_missing_files_are_named(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    first.unlink()
    second.unlink()
    _refused(sharded, first.name, second.name, "fetch")


@pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b", "C:/b"])
def test_an_index_may_not_leave_its_folder(sharded: Path, outside: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": outside}}))
    _refused(sharded, "lm_head.weight", "outside")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {"x": 3}}'])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    _refused(sharded, "model.safetensors.index.json", "fetch it again")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str, kept: int) -> None:
    save_as(tiny_gpt2(), tmp_path / "model", "bin" if name.endswith("bin") else "safetensors")
    file = tmp_path / "model" / name
    os.truncate(file, kept if kept >= 0 else file.stat().st_size - 1)
    _refused(tmp_path / "model", name, "use another copy" if name.endswith("bin") else "fetch it again")


def _safetensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file, but long enough for one",
        _safetensors({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    _refused(tmp_path, "model.safetensors", "fetch it again")


class _Malicious:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("is_new", [True, False])
def test_no_code_of_a_pickled_file_runs(tmp_path: Path, is_new: bool) -> None:
    content = {"x": torch.ones(2), "y": _Malicious(tmp_path / "it_ran")}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_new)
    _refused(tmp_path, "pytorch_model.bin", "it would run", "do not trust its source")
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("content", [torch.ones(2), {"state_dict": {"x": torch.ones(2)}}])
def test_a_pickled_file_of_another_kind_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    _refused(tmp_path, "pytorch_model.bin", "state_dict()")
