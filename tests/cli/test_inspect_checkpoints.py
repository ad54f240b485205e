"""``inspect`` shows the contents of every kind of checkpoint without running code from it."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.cli import main
from tests.checkpoint.runs import Run, make_trainer
from tests.convert.directories import tiny_gpt2
from tests.convert.legacy.layouts import Layout, even, gpt2, write
from tests.ranks import run_ranks

LAYERS = 2
HIDDEN = 16
VOCAB = 50
MODEL = {
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_embd": HIDDEN,
    "n_head": 2,
    "vocab_size": VOCAB,
    "n_positions": 16,
}


def _train_and_save(folder: str) -> None:
    import lightning.pytorch as pl

    from lightning_megatron import DatasetDataModule, MegatronModule

    pl.seed_everything(1, verbose=False)
    run = Run(strategy={"tp": 2}, trainer={"max_steps": 2})
    trainer = make_trainer(run)
    rows = [{"input_ids": torch.arange(16) % VOCAB} for _ in range(16)]
    module = MegatronModule(model=MODEL, make_vocab_size_divisible_by=8)
    trainer.fit(module, datamodule=DatasetDataModule(rows, micro_batch_size=2))
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    module.save_pretrained(f"{folder}/hf")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, ``a.ckpt``, and the same model as ``hf``."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_train_and_save, 2, str(folder))
    return folder


def _text(
    capsys: pytest.CaptureFixture[str],
    *arguments: str | Path,
    code: int = 0,
) -> str:
    """Output of the command, or its one-line error message."""
    assert main(["inspect", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    assert "this must not run" not in printed.out + printed.err
    assert code == 0 or printed.err.count("\n") == 1
    return printed.err if code else printed.out


def _json(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(_text(capsys, path, "--json"))
    return info


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


def test_inspect_own_checkpoint(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = _json(capsys, saved / "a.ckpt")

    assert info["layout"] == {"tp": 2, "pp": 1, "cp": 1, "dp": 1}
    assert (info["global_step"], info["model"]["hidden_size"]) == (2, HIDDEN)
    assert (info["data"]["DatasetDataModule"]["consumed_samples"], list(info["data"])) == (
        8,
        ["DatasetDataModule"],
    )
    tensors = {each["name"]: each for each in info["tensors"]}
    # Layers are stacked; the vocabulary is padded to a multiple of 8 x tp.
    assert tensors["decoder.layers.mlp.linear_fc1.weight"]["shape"] == [LAYERS, 4 * HIDDEN, HIDDEN]
    assert tensors["embedding.word_embeddings.weight"]["shape"] == [64, HIDDEN]
    weights = sum(each["num_bytes"] for each in info["tensors"] if not each["is_optimizer"])
    per_layer = 12 * HIDDEN**2 + 13 * HIDDEN
    assert weights == 4 * (LAYERS * per_layer + 2 * HIDDEN + (64 + 16) * HIDDEN)
    state = sum(each["num_bytes"] for each in info["tensors"] if each["is_optimizer"])
    assert state == 3 * weights  # Adam's two moments and the fp32 master weights
    text = _text(capsys, saved / "a.ckpt")
    parts = (
        "layout",
        "tp 2, pp 1, cp 1, dp 1",
        "consumed_samples 8",
        "exp_avg, exp_avg_sq, param",
        "[2, 64, 16]",
    )
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_inspect_refuses_a_damaged_description(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "a.ckpt"
    shutil.copytree(saved / "a.ckpt", path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    message = _text(capsys, path, code=2)
    assert f"{name} differs from its checksum" in message


def test_inspect_hugging_face_directory_and_file(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved / "hf")
    expected = {
        name: list(tensor.shape)
        for name, tensor in model.named_parameters()
        if name != "lm_head.weight"
    }
    info = _json(capsys, saved / "hf")
    assert {each["name"]: each["shape"] for each in info["tensors"]} == expected
    assert info["config"]["model_type"] == "gpt2"
    assert _json(capsys, saved / "hf" / "model.safetensors") == info
    assert "transformer.h.{0-1}.attn.c_attn.weight" in _text(capsys, saved / "hf")


def test_inspect_distributed_megatron_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    iteration = tmp_path / "iter_0000012"
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    shutil.copytree(saved / "a.ckpt", iteration)
    (iteration / "meta.pt").unlink()
    # The checksums identify it as a checkpoint of this package.
    assert "lacks its file meta.pt: it is damaged" in _text(capsys, iteration, code=2)
    (iteration / "checksums.json").unlink()
    arguments = argparse.Namespace(
        num_layers=LAYERS, params_dtype=torch.bfloat16, data_path=["a", "b"]
    )
    torch.save(
        {"args": arguments, "checkpoint_version": 3.0, "iteration": 12}, iteration / "common.pt"
    )

    info = _json(capsys, tmp_path)  # finds the only iteration

    assert (info["kind"], info["path"]) == (
        "Megatron-Core distributed checkpoint (torch_dist)",
        str(iteration),
    )
    assert (info["checkpoint_version"], info["iteration"]) == (3.0, 12)
    assert info["args"] == {
        "data_path": ["a", "b"],
        "num_layers": LAYERS,
        "params_dtype": "bfloat16",
    }
    assert info["tensors"] == _json(capsys, saved / "a.ckpt")["tensors"]
    tracker.write_text("12\n")
    torch.save({"args": _RunsCode()}, iteration / "common.pt")
    assert "it holds more than data (print)" in _text(capsys, tmp_path, code=2)


def test_inspect_legacy_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(
        stages=even(2, 2),
        tp=2,
        version=2.0,
        arguments={"notes": ["a"] * 1000},
    )
    iteration = write(tmp_path, layout, gpt2(tiny_gpt2()))
    info = _json(capsys, tmp_path)
    assert (info["kind"], info["path"], info["files"]) == (
        "checkpoint of Megatron-LM",
        str(iteration),
        4,
    )
    assert (info["checkpoint_version"], info["layout"], info["iteration"]) == (
        2.0,
        {"tp": 2, "pp": 2},
        40,
    )
    assert (info["consumed_samples"], info["args"]["hidden_size"], len(info["args"]["notes"])) == (
        640,
        32,
        200,
    )
    tensors = {each["name"]: each["shape"] for each in info["tensors"]}
    before = "language_model.encoder.layers.1."  # layer 0 of the second stage
    assert tensors[f"{before}self_attention.query_key_value.weight"] == [96, 32]
    assert tensors[f"{before}mlp.dense_4h_to_h.weight"] == [32, 128]
    assert len(tensors) == 2 * 12 + 4
    text = _text(capsys, iteration)
    parts = (
        "tp 2, pp 2",
        "language_model.encoder.layers.{0-1}.input_layernorm.weight",
        "num_layers 2",
    )
    assert [part for part in parts if part not in text] == []


def test_control_characters_in_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    save_file({"\x1b]0;mine\x07\nforged": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"model_type": "\\u001b[31mgpt2", "n_embd": "\\u202egnorw"}'
    )
    main(["inspect", str(tmp_path)])
    printed = "".join(capsys.readouterr())
    assert all(line.isprintable() for line in printed.splitlines())
    assert "\\x1b" in printed
