"""Distributed checkpoints of other programs are read, and what is wrong with one is said."""

import argparse
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_megatron.convert.contents import open_source
from lightning_megatron.convert.convert import ConvertOptions, convert
from lightning_megatron.errors import CheckpointError
from tests.checkpoint.damage import update_checksums
from tests.convert.directories import save_as, tiny, tiny_gpt2
from tests.convert.weights import assert_same_weights, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

_LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def _write(folder: Path, tensors: Mapping[str, Any], common: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint by torch's own writer, in its own chunks: each tensor is one."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backends))
    torch.save(dict(common or {}), folder / "common.pt")
    return folder


def _stacked(source: Path) -> dict[str, torch.Tensor]:
    """What Megatron-Core would name and stack, from a directory of Hugging Face."""
    layers: dict[str, list[torch.Tensor]] = {}
    tensors = {}
    for key, tensor in weights_of(source).tensors.items():
        if key.layer is None:
            tensors[key.name] = tensor
        else:
            layers.setdefault(key.name, []).append(tensor)
    return {**tensors, **{name: torch.stack(each) for name, each in layers.items()}}


def _numbered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each layer by itself, with norms of their own, inside a wrapper."""
    named = {}
    for name, tensor in tensors.items():
        for fused, own in _LOCAL.items():
            name = name.replace(fused, own)
        if ".layers." not in name:
            named[f"module.{name}"] = tensor
        for layer in range(len(tensor) if ".layers." in name else 0):
            named["module." + name.replace(".layers.", f".layers.{layer}.")] = tensor[layer].clone()
    return named


def _padded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    word = "embedding.word_embeddings.weight"
    return {**tensors, word: torch.cat([tensors[word], torch.full((13, 32), 7.0)])}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers."""
    folder = tmp_path_factory.mktemp("foreign") / "gpt2"
    save_as(tiny_gpt2(), folder, "safetensors")
    return folder


@pytest.mark.parametrize("change", [dict, _numbered, _padded], ids=["stacked", "numbered", "padded"])
def test_checkpoints_of_any_program_are_read(tmp_path: Path, source: Path, change: Callable[..., Any]) -> None:
    path = _write(tmp_path / "core", {**change(_stacked(source)), "decoder._extra_state": torch.zeros(3)})
    found = weights_of(path, source / "config.json")
    assert_same_weights(found, weights_of(source))
    assert found.source.iteration == 0


def _without_common_file(path: Path, tensors: Mapping[str, Any], common: Mapping[str, Any]) -> Path:
    """As megatron-core 0.17 to 0.19 write it: what is not sharded is one more object among the shards."""
    shutil.rmtree(path)
    _write(path, {**tensors, "common_state/shard_0_1": [dict(common)]})
    (path / "common.pt").unlink()
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return path


def test_megatron_lms_arguments_describe_the_model(tmp_path: Path) -> None:
    save_as(tiny("qwen2"), tmp_path / "source", "safetensors")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    arguments = argparse.Namespace(
        **{"num_attention_heads": 4, "swiglu": True, "position_embedding_type": "rope", "normalization": "RMSNorm"},
        **{"norm_epsilon": config["rms_norm_eps"], "max_position_embeddings": 24},
        untie_embeddings_and_output_weights=False,
    )
    common = {"args": arguments, "iteration": 12, "checkpoint_version": 3.0}
    path, tensors = tmp_path / "core", _stacked(tmp_path / "source")
    for write in (_write, _without_common_file):
        found = weights_of(write(path, tensors, common))
        assert (found.source.model.family, found.source.iteration) == ("qwen2", 12)
        assert_same_weights(found, weights_of(tmp_path / "source"))


# ---- what is wrong --------------------------------------------------------------------------------------------------


def _point_outside(folder: Path) -> None:
    shutil.copy(_file(folder), folder.parent / "other.distcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    for place in table.storage_data.values():
        place.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(table))


class _Hostile:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def _file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: _file(f).write_bytes(_file(f).read_bytes()[:-100]), r"expected \d+ bytes in .*, got \d+;"),
    "missing": (lambda f: _file(f).unlink(), "is damaged: .* got no such file"),
    "shifted": (lambda f: _file(f).write_bytes(b"x" * 64 + _file(f).read_bytes()[:-64]), "is damaged"),
    "outside": (_point_outside, "outside itself"),
    "hostile table": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(_Hostile())), "would run builtins.print"),
    "hostile common": (lambda f: torch.save({"args": _Hostile()}, f / "common.pt"), r"it holds more than data .print"),
}


@pytest.mark.parametrize("kind", HARM)
def test_what_is_damaged_or_hostile_is_refused(
    tmp_path: Path, source: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (harm, says) = _write(tmp_path / "core", _stacked(source)), HARM[kind]
    harm(path)
    with pytest.raises(CheckpointError, match=says):
        convert(ConvertOptions(load_path=path, save_path=tmp_path / "hf", to="hf", config=source / "config.json"))
    assert "run" not in capsys.readouterr().out
    assert not (tmp_path / "hf").exists()


def _change_meta(path: Path, **changes: Any) -> None:
    meta: dict[str, Any] = torch.load(path / "meta.pt", weights_only=True)
    merged = {name: {**meta[name], **each} if isinstance(each, dict) else each for name, each in changes.items()}
    torch.save({**meta, **merged}, path / "meta.pt")
    (path / "checksums.json").unlink()
    update_checksums(path)


@pytest.fixture
def own(tmp_path: Path, source: Path) -> Path:
    """A checkpoint of ours."""
    convert(ConvertOptions(load_path=source, save_path=tmp_path / "run.ckpt", to="megatron", dtype="fp16"))
    return tmp_path / "run.ckpt"


def test_a_flipped_bit_is_found(own: Path) -> None:
    file = next(own.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="distcp differs from its checksum"):
        open_source(own)
    (own / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match="lacks its file checksums.json"):
        open_source(own)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_description": {"activation": "relu"}}, "activation=relu .the config says gelu_tanh"),
        ({"format_version": 99}, "format version"),
    ],
    ids=str,
)
def test_what_no_config_describes_or_no_reader_knows_is_refused(own: Path, changes: dict[str, Any], says: str) -> None:
    _change_meta(own, **changes)
    with pytest.raises(CheckpointError, match=says):
        open_source(own)


def test_a_checkpoint_without_a_config_needs_one(own: Path, source: Path) -> None:
    _change_meta(own, hugging_face_config=None)
    with pytest.raises(CheckpointError, match="--config"):
        open_source(own)
    found = weights_of(own, source / "config.json")
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float16}
    assert_same_weights(found, weights_of(source))
