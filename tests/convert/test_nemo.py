"""Checkpoints of NeMo 2, written by its own classes (nemo2/make.py): conversion, runs from them, and hostile ones."""

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.convert.formats import open_source
from lightning_megatron.errors import CheckpointError
from tests.checkpoint.runs import Run
from tests.cli.command import run_all
from tests.convert.directories import converted, tensors_in
from tests.convert.nemo2.make import TARGET
from tests.convert.test_hybrid_model import first_loss, rows
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``nemo``, the checkpoint that NeMo wrote, and ``hf``, the Hugging Face model that NeMo's importer read."""
    unpacked = tmp_path_factory.mktemp("nemo")
    with tarfile.open(TARGET) as archive:
        archive.extractall(unpacked, filter="data")
    return unpacked


def test_hugging_face_model_comes_back(tmp_path: Path, folder: Path) -> None:
    path = converted(folder / "nemo", tmp_path / "exported")
    expected = tensors_in(folder / "hf")
    tensors = tensors_in(path)
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(expected[name]) for name in expected)
    exported = open_source(path).model
    assert exported.to_dict() == open_source(folder / "hf").model.to_dict()
    assert (path / "tokenizer.json").is_file()


def test_run_begins_with_its_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = Run(
        model={"model_type": "llama", **open_source(folder / "hf").hf_config.to_diff_dict()},
        loader=rows,
        trainer={"max_steps": 1},
        strategy={"tp": 2, "load_from": str(folder / "nemo")},
    )
    (batch,) = rows(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    expected = model(**batch, labels=batch["input_ids"]).loss.item()
    assert run_ranks(first_loss, 2, run) == [pytest.approx(expected, rel=1e-5)] * 2


def test_inspect_and_generate_take_it(folder: Path) -> None:
    prompt = ("--prompt", "w1 w2 w3", "--max-new-tokens", "4")
    commands = [
        ("inspect", "nemo"),
        ("generate", "--checkpoint", "nemo", *prompt),
        ("generate", "--checkpoint", "hf", *prompt),
    ]
    (code, out, error), generated, expected = run_all(folder, commands)
    assert code == 0, error
    assert "checkpoint of NeMo 2" in out
    assert "module.decoder.layers.self_attention.linear_qkv.layer_norm_weight" in out
    assert generated[0] == 0, generated[2]
    assert generated[1] == expected[1]


# ---- refused ---------------------------------------------------------------------------------------------------------


def _set(**values: Any) -> Callable[[Path], None]:
    """Set values of the model's config."""

    def change(path: Path) -> None:
        file = path / "context" / "model.yaml"
        content = yaml.safe_load(file.read_text())
        content["config"] |= values
        file.write_text(yaml.safe_dump(content))

    return change


def _write(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "context" / "model.yaml").write_text(text)

    return change


_BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)

REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no context": (
        lambda path: shutil.rmtree(path / "context"),
        "has no context/model.yaml .* --config",
    ),
    "another class": (
        _set(_target_="nemo.collections.llm.gpt.model.gemma.GemmaConfig"),
        "got nemo.collections.llm.gpt.model.gemma.GemmaConfig; .* --config",
    ),
    "experts": (_set(num_moe_experts=8), "no known model family has num_experts=8; .* --config"),
    "frequencies": (
        _set(scale_factor=8.0, low_freq_factor=2.0),
        "expected low_freq_factor=1.0 with scale_factor=8.0, got 2.0",
    ),
    "activation": (
        _set(activation_func={"_target_": "nemo.collections.llm.fn.squared_relu"}),
        "expected activation_func=silu or gelu without gates, got squared_relu",
    ),
    "scale": (_set(softmax_scale=0.5), "no known model family has softmax_scale=0.5"),
    "gate": (_set(attention_output_gate=True), "has attention_output_gate=True"),
    "own layers": (
        _set(transformer_layer_spec={"_target_": "mine.spec", "_call_": False}),
        "expected layers of NeMo's own specs, got transformer_layer_spec=mine.spec",
    ),
    "centred norms": (_set(layernorm_zero_centered_gamma=True), "has apply_layernorm_1p=True"),
    "no mapping": (_write("- 1"), "expected the arguments of a model of NeMo"),
    "code": (_write("config: !!python/object/apply:os.system ['touch ran']"), "cannot be read"),
    "number": (_write(f"config: 1{':1' * 500_000}"), "expected numbers of at most 1,000 char"),
    "type": (_write("config: !!bool maybe"), "got KeyError"),
    "aliases": (_write(_BOMB), "expected at most 100,000 values"),
    "adapters": (
        lambda path: (path / "weights" / "adapter_metadata.json").write_text("{}"),
        "expected a whole model, got adapters of NeMo",
    ),
    "zarr": (
        lambda path: (path / "weights" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "unreadable metadata.json: expected .*torch_dist",
    ),
    "truncated": (
        lambda path: next(path.glob("weights/*.distcp")).write_bytes(b""),
        "is damaged: expected",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_values_do_not_say_is_refused(
    tmp_path: Path, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(shutil.copytree(folder / "nemo", tmp_path / "nemo"))
    change, message = REFUSED[kind]
    change(path)
    with pytest.raises(CheckpointError, match=message):
        open_source(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["no context", "another class"])
def test_given_config_describes_the_model(tmp_path: Path, folder: Path, kind: str) -> None:
    path = Path(shutil.copytree(folder / "nemo", tmp_path / "nemo"))
    REFUSED[kind][0](path)
    exported = converted(path, tmp_path / "exported", config=folder / "hf" / "config.json")
    expected = tensors_in(folder / "hf")
    tensors = tensors_in(exported)
    assert all(tensors[name].equal(expected[name]) for name in expected)


def test_files_of_context_that_name_objects_are_not_opened(tmp_path: Path, folder: Path) -> None:
    path = Path(shutil.copytree(folder / "nemo", tmp_path / "nemo"))
    (path / "context" / "io.json").write_text("not JSON")
    (path / "context" / "4dd0a1bb").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert open_source(path).model.num_layers == 4
