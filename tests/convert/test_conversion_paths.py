"""Mistakes are found before a weight is read, and nothing half-written is found under the final name."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.convert.contents import open_source
from lightning_megatron.convert.convert import ConvertOptions, convert
from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.convert.directories import save_as, tiny_llama
from tests.convert.test_hugging_face import full_disk


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama of four heads in two groups and four layers."""
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    return tmp_path / "source"


def _options(source: Path, **options: Any) -> ConvertOptions:
    return ConvertOptions(**{"load_path": source, "save_path": source.with_name("target"), "to": "hf", **options})


def _nothing_but_the_source(source: Path) -> bool:
    return [path.name for path in source.parent.iterdir()] == ["source"]


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "onnx"}, "to='onnx' is unknown; choose from hf, megatron, megatron-legacy"),
        ({"dtype": "fp8"}, "dtype='fp8' is unknown"),
        ({"max_shard_size": "many"}, "max_shard_size='many' is not a size"),
        ({"pp": 2}, "pp=2 would do nothing with to=hf"),
        ({"to": "megatron", "max_shard_size": "1GB"}, "max_shard_size=1GB would do nothing with to=megatron"),
        ({"to": "megatron", "make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by=0 must be at least 1"),
        ({"to": "megatron", "tp": 3}, "tp=3 does not divide num_attention_heads=4; choose tp from 1, 2, 4"),
        ({"to": "megatron", "vpp": 2}, "vpp=2 interleaves pipeline stages, but pp=1"),
        ({"to": "megatron", "pp": 3, "vpp": 2}, "pp=3 x vpp=2 = 6 stages are more than the 4 layers"),
        ({"iteration": 5}, "iteration=5 would do nothing"),
        ({"tokenizer": Path("nowhere")}, "tokenizer directory nowhere is missing"),
        ({"tokenizer": Path(__file__).parent}, "holds no tokenizer that transformers can load"),
        ({"config": Path(__file__)}, "cannot be read as JSON"),
    ],
    ids=str,
)
def test_mistakes_in_options(source: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(_options(source, **options))
    assert _nothing_but_the_source(source)


def test_mistakes_in_paths(source: Path) -> None:
    full = source.with_name("full")
    full.mkdir()
    (full / "file").write_text("")
    for save_path, says in (
        (full, "full is not empty; give a new name, or remove it"),
        (full / "file", "is a file"),
        (full / "file" / "below", "below cannot be written .*Not a directory"),
        (source.parent, "is not empty"),
    ):
        with pytest.raises(ConfigError, match=says):
            convert(_options(source, save_path=save_path))
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        convert(_options(source, load_path=source.with_name("nowhere")))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "source: expected .* got a file"),
        ({}, "expected a Hugging Face model directory .* got an empty directory"),
        ({"config.json": "{}"}, "directory with weights, .* got config.json"),
        ({"a.ckpt/x": "", "b.ckpt/x": ""}, "got a.ckpt, b.ckpt; give one of these"),
        ({"model.safetensors": ""}, "model.safetensors is truncated or damaged"),
        ({"iter_0000002/x": "", "iter_0000010/x": ""}, "expected one iteration .*, got iter_0000002, "),
    ],
    ids=str,
)
def test_other_things(tmp_path: Path, files: dict[str, str] | None, says: str) -> None:
    folder = tmp_path / "source"
    if files is None:
        folder.touch()
    else:
        folder.mkdir()
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        convert(_options(folder))


def test_weights_without_a_config_need_one(source: Path, tmp_path: Path) -> None:
    (source / "config.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json.*--config"):
        convert(_options(source))
    convert(_options(source, config=tmp_path / "elsewhere.json"))
    assert (source.with_name("target") / "config.json").is_file()


def test_a_file_of_a_model_or_checkpoint_means_the_whole(source: Path, tmp_path: Path) -> None:
    assert open_source(source / "model.safetensors").path == source
    (source / "adapter_model.safetensors").write_bytes(b"other weights than the model's")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: expected .* got a file"):
        open_source(source / "adapter_model.safetensors")
    path = tmp_path / "a.ckpt"
    convert(_options(source, save_path=path, to="megatron"))
    assert {open_source(path / name).path for name in ("meta.pt", ".metadata")} == {path}
    (path / "meta.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks its file meta\.pt: it is damaged"):
        open_source(path)


# ---- what is left behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-legacy"])
def test_what_fails_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    with pytest.raises(CheckpointError, match=r"writ.*(File too large|is the disk full)"), full_disk():
        convert(_options(source, to=to))
    assert _nothing_but_the_source(source)

    def read(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HuggingFaceSource, "read", read)
    with pytest.raises(KeyboardInterrupt):
        convert(_options(source, to=to))
    assert _nothing_but_the_source(source)
