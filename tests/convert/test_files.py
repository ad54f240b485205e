"""Weight files of a model directory: which ones are read, and every damage is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_megatron.convert.hugging_face import open_weights
from lightning_megatron.errors import CheckpointError
from tests.convert.directories import save_as, tiny_gpt2, tiny_llama

Change = Callable[[Path], object]


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"x": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(open_weights(tmp_path).read("x", (slice(0, 2),)), torch.ones(2))


class _Malicious:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def _without_two_files(folder: Path) -> None:
    for file in sorted(folder.glob("model-*.safetensors"))[:2]:
        file.unlink()


def _index(text: str) -> Change:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def _index_to(file: str) -> Change:
    return _index(json.dumps({"weight_map": {"lm_head.weight": file}}))


def _cut(name: str, kept: int) -> Change:
    return lambda folder: os.truncate(folder / name, kept if kept >= 0 else (folder / name).stat().st_size - 1)


def _header(content: bytes) -> Change:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def _pickled(content: Any, is_new: bool = True) -> Change:
    return lambda folder: torch.save(
        content(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_new
    )


_HEADER = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
_DAMAGED = ("model.safetensors.index.json", "fetch it again")
_RUNS_CODE = ("pytorch_model.bin", "it would run", "do not trust its source")
DAMAGE: dict[str, tuple[str | None, Change, tuple[str, ...]]] = {
    "no folder": (None, lambda folder: folder.rmdir(), ("does not exist",)),
    "nothing": (None, lambda _: None, ("model.safetensors", "pytorch_model.bin", "pretrained=False")),
    "two files less": ("sharded_safetensors", _without_two_files, ("model-00001-of-", "model-00002-of-", "fetch")),
    **{f"index to {file}": ("sharded_safetensors", _index_to(file), ("lm_head.weight", "outside"))
       for file in ("../other.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b", "C:/b")},
    **{f"index {text[:20]}": ("sharded_safetensors", _index(text), _DAMAGED)
       for text in ("", "{", "[]", "{}", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {"x": 3}}')},
    **{f"safetensors of {kept}": ("safetensors", _cut("model.safetensors", kept), ("fetch it again",))
       for kept in (0, 4, 100, -1)},
    **{f"pickle of {kept}": ("bin", _cut("pytorch_model.bin", kept), ("use another copy",))
       for kept in (0, 4, 100, -1)},
    "no header": (None, _header(b"no safetensors file, but long enough for one"), ("fetch it again",)),
    "header of another file": (None, _header(len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8)), ("fetch it",)),
    "code": (None, _pickled(lambda folder: {"x": _Malicious(folder / "it_ran")}), _RUNS_CODE),
    "code in an old file": (None, _pickled(lambda folder: {"x": _Malicious(folder / "it_ran")}, False), _RUNS_CODE),
    "a tensor": (None, _pickled(lambda _: torch.ones(2)), ("state_dict()",)),
    "a nested dict": (None, _pickled(lambda _: {"state_dict": {"x": torch.ones(2)}}), ("state_dict()",)),
}  # fmt: skip
"""Format that is written, what is changed then, and what the error says."""


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_wrong_with_files_is_named(tmp_path: Path, case: str) -> None:
    kind, change, words = DAMAGE[case]
    folder = tmp_path / "model"
    if kind is None:
        folder.mkdir()
    else:
        save_as(tiny_llama() if kind.startswith("sharded") else tiny_gpt2(), folder, kind)  # type: ignore[arg-type]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        open_weights(folder)
    assert [word for word in (str(folder), *words) if word not in str(caught.value)] == []
    assert not (folder / "it_ran").exists()
