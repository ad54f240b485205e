"""Reading distributed checkpoints of other programs, and errors for damaged or hostile ones."""

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
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_megatron.convert.formats import open_source
from lightning_megatron.errors import CheckpointError
from tests.checkpoint.damage import update_checksums
from tests.convert.directories import converted, save_as, tiny, tiny_gpt2
from tests.convert.weights import assert_same_weights, weights_of

_LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def write_distributed(
    folder: Path,
    tensors: Mapping[str, Any],
    common: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint with torch's own writer; each tensor is one chunk."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(
        dict(tensors),
        storage_writer=dcp.FileSystemWriter(folder),
        planner=planner,
        no_dist=True,
    )
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backends))
    torch.save(dict(common or {}), folder / "common.pt")
    return folder


def stacked(source: Path) -> dict[str, Tensor]:
    """The weights of a Hugging Face directory under Megatron-Core's names, with layers stacked."""
    layers: dict[str, list[Tensor]] = {}
    tensors = {}
    for key, tensor in weights_of(source).tensors.items():
        if key.layer is None:
            tensors[key.name] = tensor
        else:
            layers.setdefault(key.name, []).append(tensor)
    return {
        **tensors,
        **{name: torch.stack(tensors_of_layers) for name, tensors_of_layers in layers.items()},
    }


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor per layer, unfused norms, and the prefix of a wrapper module."""
    named = {}
    for name, tensor in tensors.items():
        for fused, own in _LOCAL.items():
            name = name.replace(fused, own)
        if ".layers." not in name:
            named[f"module.{name}"] = tensor
        for layer in range(len(tensor) if ".layers." in name else 0):
            named["module." + name.replace(".layers.", f".layers.{layer}.")] = tensor[layer].clone()
    return named


def _padded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With 13 rows of vocabulary padding."""
    name = "embedding.word_embeddings.weight"
    return {
        **tensors,
        name: torch.cat([tensors[name], torch.full((13, 32), 7.0)]),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers."""
    folder = tmp_path_factory.mktemp("foreign") / "gpt2"
    save_as(tiny_gpt2(), folder, "safetensors")
    return folder


@pytest.mark.parametrize(
    "change", [dict, _numbered, _padded], ids=["stacked", "numbered", "padded"]
)
def test_layer_and_padding_conventions_are_read(
    tmp_path: Path, source: Path, change: Callable[..., Any]
) -> None:
    path = write_distributed(
        tmp_path / "core", {**change(stacked(source)), "decoder._extra_state": torch.zeros(3)}
    )
    weights = weights_of(path, source / "config.json")
    assert_same_weights(weights, weights_of(source))
    assert weights.source.iteration == 0


def _without_common_file(
    path: Path,
    tensors: Mapping[str, Any],
    common: Mapping[str, Any],
) -> Path:
    """As megatron-core 0.17 to 0.19 write it: the unsharded state is one more object among the shards."""
    shutil.rmtree(path)
    write_distributed(path, {**tensors, "common_state/shard_0_1": [dict(common)]})
    (path / "common.pt").unlink()
    (path / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return path


def test_megatron_lm_arguments_describe_the_model(tmp_path: Path) -> None:
    save_as(tiny("qwen2"), tmp_path / "source", "safetensors")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    arguments = argparse.Namespace(
        **{
            "num_attention_heads": 4,
            "swiglu": True,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
        },
        **{"norm_epsilon": config["rms_norm_eps"], "max_position_embeddings": 24},
        untie_embeddings_and_output_weights=False,
    )
    common = {"args": arguments, "iteration": 12, "checkpoint_version": 3.0}
    path = tmp_path / "core"
    tensors = stacked(tmp_path / "source")
    for write in (write_distributed, _without_common_file):
        weights = weights_of(write(path, tensors, common))
        assert (weights.source.model.family, weights.source.iteration) == ("qwen2", 12)
        assert_same_weights(weights, weights_of(tmp_path / "source"))


# ---- errors ---------------------------------------------------------------------------------------------------------


def _point_outside(folder: Path) -> None:
    shutil.copy(_file(folder), folder.parent / "other.distcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    for storage in table.storage_data.values():
        storage.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def _half_twice(folder: Path) -> None:
    """As many values as the tensor has, half of them twice and the others never."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    entry = table.state_dict_metadata["embedding.word_embeddings.weight"]
    rows, columns = entry.size
    half = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((rows, columns // 2)))
    entry.chunks = [half, half]
    (folder / ".metadata").write_bytes(pickle.dumps(table))


class _RunsCode:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def _file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda f: _file(f).write_bytes(_file(f).read_bytes()[:-100]),
        r"expected \d+ bytes in .*, got \d+;",
    ),
    "missing": (lambda f: _file(f).unlink(), "is damaged: .* got no such file"),
    "shifted": (
        lambda f: _file(f).write_bytes(b"x" * 64 + _file(f).read_bytes()[:-64]),
        "is damaged",
    ),
    "half twice": (_half_twice, "has some values of 'embedding.word_embeddings.weight' twice"),
    "outside": (_point_outside, "outside itself"),
    "hostile table": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(_RunsCode())),
        "would run builtins.print",
    ),
    "hostile common": (
        lambda f: torch.save({"args": _RunsCode()}, f / "common.pt"),
        r"it holds more than data .print",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_or_hostile_checkpoint_is_refused(
    tmp_path: Path, source: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_distributed(tmp_path / "core", stacked(source))
    damage, message = DAMAGE[kind]
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        converted(path, tmp_path / "hf", config=source / "config.json")
    assert "run" not in capsys.readouterr().out
    assert not (tmp_path / "hf").exists()


def test_two_tensors_that_are_one_of_the_model_are_refused(tmp_path: Path, source: Path) -> None:
    tensors = stacked(source)
    name = "decoder.final_layernorm.weight"
    tensors[f"module.{name}"] = tensors[name] + 1
    path = write_distributed(tmp_path / "core", tensors)
    with pytest.raises(CheckpointError, match=f"has two tensors that are {name}"):
        converted(path, tmp_path / "hf", config=source / "config.json")


def _change_meta(path: Path, **changes: Any) -> None:
    meta: dict[str, Any] = torch.load(path / "meta.pt", weights_only=True)
    merged = {
        key: {**meta[key], **value} if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    torch.save({**meta, **merged}, path / "meta.pt")
    update_checksums(path)


@pytest.fixture
def own(tmp_path: Path, source: Path) -> Path:
    """A checkpoint of this package, in fp16."""
    return converted(source, tmp_path / "run.ckpt", to="megatron", dtype="fp16")


def test_flipped_bit_and_missing_checksums_are_refused(own: Path) -> None:
    content = bytearray(_file(own).read_bytes())
    content[len(content) // 2] ^= 4
    _file(own).write_bytes(content)
    with pytest.raises(CheckpointError, match="distcp differs from its checksum"):
        open_source(own)
    (own / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match="lacks its file checksums.json"):
        open_source(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_description": {"activation": "relu"}},
            "activation=relu .the config says gelu_tanh",
        ),
        ({"format_version": 99}, "format version"),
    ],
    ids=str,
)
def test_undescribed_model_or_unknown_version_is_refused(
    own: Path, changes: dict[str, Any], message: str
) -> None:
    _change_meta(own, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_source(own)


def test_checkpoint_without_config_needs_the_config_option(own: Path, source: Path) -> None:
    _change_meta(own, hugging_face_config=None)
    with pytest.raises(CheckpointError, match="--config"):
        open_source(own)
    weights = weights_of(own, source / "config.json")
    assert {tensor.dtype for tensor in weights.tensors.values()} == {torch.float16}
    assert_same_weights(weights, weights_of(source))
