"""Mistakes in options and paths are refused before reading weights; failed conversions leave no files."""

from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from peft import LoraConfig, get_peft_model

from lightning_megatron.convert import ConvertOptions, Format
from lightning_megatron.convert.convert import convert
from lightning_megatron.convert.formats import open_source
from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.convert.directories import save_as, tiny_llama
from tests.convert.test_hugging_face import full_disk


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Directory of a Llama with four layers, four heads and two query groups."""
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    return tmp_path / "source"


def _options(source: Path, **options: Any) -> ConvertOptions:
    return ConvertOptions(
        **{"load_path": source, "save_path": source.with_name("target"), "to": "hf", **options}
    )


def _only_source_exists(source: Path) -> bool:
    return [path.name for path in source.parent.iterdir()] == ["source"]


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onnx"}, "to='onnx' is unknown; choose from hf, megatron, megatron-legacy"),
        ({"dtype": "fp8"}, "dtype='fp8' is unknown"),
        ({"max_shard_size": "many"}, "max_shard_size='many' is not a size"),
        (
            {"to": "megatron", "max_shard_size": "1GB"},
            "max_shard_size=1GB would do nothing with to=megatron",
        ),
        (
            {"to": "megatron", "make_vocab_size_divisible_by": 0},
            "make_vocab_size_divisible_by=0 must be at least 1",
        ),
        ({"to": "megatron", "vpp": 2}, "vpp=2 interleaves pipeline stages, but pp=1"),
        (
            {"to": "megatron", "pp": 3, "vpp": 2},
            "pp=3 x vpp=2 = 6 stages are more than the 4 layers",
        ),
        ({"iteration": 5}, "iteration=5 would do nothing"),
        ({"tokenizer": Path("nowhere")}, "tokenizer directory nowhere is missing"),
        ({"tokenizer": Path(__file__).parent}, "holds no tokenizer that transformers can load"),
        ({"config": Path(__file__)}, "cannot be read as JSON"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(
    source: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(_options(source, **options))
    assert _only_source_exists(source)


def test_wrong_paths_are_refused(source: Path) -> None:
    full = source.with_name("full")
    full.mkdir()
    (full / "file").write_text("")
    for save_path, message in (
        (full, "full is not empty; give a new name, or remove it"),
        (full / "file", "is a file"),
        (full / "file" / "below", "below cannot be written .*Not a directory"),
        (source.parent, "is not empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(_options(source, save_path=save_path))
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        convert(_options(source, load_path=source.with_name("nowhere")))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "source: expected .* got a file"),
        ({}, "expected a Hugging Face model directory .* got an empty directory"),
        ({"config.json": "{}"}, "directory with weights, .* got config.json"),
        ({"a.ckpt/x": "", "b.ckpt/x": ""}, "got a.ckpt, b.ckpt; give one of these"),
        ({"model.safetensors": ""}, "model.safetensors is truncated or damaged"),
        (
            {"iter_0000002/x": "", "iter_0000010/x": ""},
            "expected one iteration .*, got iter_0000002, ",
        ),
    ],
    ids=str,
)
def test_sources_that_are_no_checkpoint_are_refused(
    tmp_path: Path, files: dict[str, str] | None, message: str
) -> None:
    folder = tmp_path / "source"
    if files is None:
        folder.touch()
    else:
        folder.mkdir()
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        convert(_options(folder))


def test_weights_without_config_need_the_config_option(source: Path, tmp_path: Path) -> None:
    (source / "config.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json.*--config"):
        convert(_options(source))
    convert(_options(source, config=tmp_path / "elsewhere.json"))
    assert (source.with_name("target") / "config.json").is_file()


def test_file_of_a_model_or_checkpoint_opens_its_directory(source: Path, tmp_path: Path) -> None:
    assert open_source(source / "model.safetensors").path == source
    (source / "adapter_model.safetensors").write_bytes(b"other weights than the model's")
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.safetensors: expected .* got a file"
    ):
        open_source(source / "adapter_model.safetensors")
    path = tmp_path / "a.ckpt"
    convert(_options(source, save_path=path, to="megatron"))
    assert {open_source(path / name).path for name in ("meta.pt", ".metadata")} == {path}
    (path / "meta.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks its file meta\.pt: it is damaged"):
        open_source(path)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-legacy"])
def test_failed_conversion_leaves_no_files(
    source: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    with (
        pytest.raises(CheckpointError, match=r"writ.*(File too large|is the disk full)"),
        full_disk(),
    ):
        convert(_options(source, to=to))
    assert _only_source_exists(source)

    def read(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HuggingFaceSource, "read", read)
    with pytest.raises(KeyboardInterrupt):
        convert(_options(source, to=to))
    assert _only_source_exists(source)


@pytest.mark.parametrize("kind", ["safetensors", "sharded_safetensors"])
@pytest.mark.parametrize("to", get_args(Format))
def test_output_below_a_model_directory_leaves_that_model_as_it_is(
    kind: Literal["safetensors", "sharded_safetensors"], to: Format, tmp_path: Path
) -> None:
    """The staging directory of a new directory is beside it, here among the files of the model."""
    source = tmp_path / "source"
    save_as(tiny_llama(), source, kind)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    load_path = source
    base = None
    if to == "peft":
        load_path = tmp_path / "adapter"
        base = str(source)
        adapted = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))
        adapted.save_pretrained(load_path)
    target = source / "converted"
    convert(_options(load_path, save_path=target, to=to, base=base))
    after = {file.name: file.read_bytes() for file in source.iterdir() if file != target}
    assert after == before
    assert any(target.iterdir())
