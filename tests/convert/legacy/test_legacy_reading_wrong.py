"""A legacy checkpoint that is incomplete, a mixture or of another model is refused, and what is wrong is named."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import CheckpointError
from tests.convert.directories import tiny_gpt2, tiny_llama
from tests.convert.legacy.layouts import Layout, even, gpt2, llama, write
from tests.convert.weights import weights_of

FILE = "model_optim_rng.pt"


def _gpt2(folder: Path, **fields: Any) -> Path:
    return write(folder, Layout(**{"stages": even(2, 2), "tp": 2, **fields}), gpt2(tiny_gpt2()))


def _changed(folder: Path, rank: str, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / rank / FILE
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)


def _encoder(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    encoder: dict[str, torch.Tensor] = state["model"]["language_model"]["encoder"]
    return encoder


def test_files_that_are_missing(tmp_path: Path) -> None:
    folder = _gpt2(tmp_path)
    alone = "written with tensor_model_parallel_size=2 and has the files of 1"
    for path in (folder / "mp_rank_01_001", folder / "mp_rank_00_000" / FILE):
        with pytest.raises(CheckpointError, match=alone):
            weights_of(path)
    (folder / "mp_rank_01_000" / FILE).unlink()
    with pytest.raises(CheckpointError, match="lacks the file of mp_rank_01_000: there are 3 of tp=2 x pp=2"):
        weights_of(folder)
    (folder / "mp_rank_01_001" / FILE).unlink()
    with pytest.raises(CheckpointError, match=alone):
        weights_of(folder)


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "a shape of one rank": (
        "mp_rank_01_000",
        lambda state: _encoder(state).update({"layers.0.input_layernorm.weight": torch.ones(31)}),
        "is a mixture: mp_rank_01_000 has other tensors or another version than mp_rank_00_000",
    ),
    "a version": (
        "mp_rank_01_001",
        lambda state: state.update(checkpoint_version=2.0),
        "is a mixture: mp_rank_01_001 has other tensors or another version than mp_rank_00_000",
    ),
    "an unknown version": (
        "mp_rank_*",
        lambda state: state.update(checkpoint_version=4.0),
        "checkpoint_version=4 is unknown; known are 0, 1, 2, 3",
    ),
    "the copy of the embedding": (
        "mp_rank_01_001",
        lambda state: state["model"]["word_embeddings_for_head"]["weight"][0, 0].add_(1),
        "disagree in embedding.word_embeddings.weight",
    ),
    "a tensor of no model": (
        "mp_rank_*_001",
        lambda state: _encoder(state).update({"layers.0.mlp.router.weight": torch.ones(3)}),
        "no known Hugging Face family has .*decoder.layers.mlp.router.weight",
    ),
    "a tensor too few": (
        "mp_rank_*_001",
        lambda state: _encoder(state).pop("layers.0.mlp.dense_4h_to_h.bias"),
        "'decoder.layers.1.mlp.linear_fc2.bias' is missing",
    ),
    "experts": ("mp_rank_*", lambda state: vars(state["args"]).update(num_experts=8), "family has num_experts=8"),
    "heads that do not divide": (
        "mp_rank_*",
        lambda state: vars(state["args"]).update(num_attention_heads=5),
        "num_attention_heads=5 does not divide 32 columns",
    ),
    "a foreign config": (
        "mp_rank_*",
        lambda state: vars(state["args"]).update(hugging_face_config='{"model_type": "mamba"}'),
        "'mamba' is not a known model family",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    ranks, change, message = CHANGES[case]
    folder = _gpt2(tmp_path)
    for rank in sorted(each.name for each in folder.glob(ranks)):
        _changed(folder, rank, change)

    with pytest.raises(ValueError, match=message) as error:
        weights_of(tmp_path)

    assert "\n" not in str(error.value)


def test_a_config_of_another_model(tmp_path: Path) -> None:
    _gpt2(tmp_path / "gpt2")
    model = tiny_gpt2()
    fields = {**model.config.to_dict(), "n_layer": 3, "n_inner": 64}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as error:
        weights_of(tmp_path / "gpt2", config)
    assert "'decoder.layers.2.self_attention.linear_qkv.weight' is missing" in str(error.value)
    config.write_text(json.dumps({**model.config.to_dict(), "vocab_size": 500}))
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight' has the shape \[\d+, 32\], not \[500, 32\]"):
        weights_of(tmp_path / "gpt2", config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rotary_percent", 0.25), ("position_embedding_type", "alibi"), ("position_embedding_type", "none")],
)
def test_decoders_of_no_known_family(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path, Layout(stages=even(4), arguments={name: value}), llama(tiny_llama()))
    with pytest.raises(CheckpointError, match=f"{name}={value}.*give the Hugging Face config.json"):
        weights_of(tmp_path)


def test_damaged_zip_files(tmp_path: Path) -> None:
    file = _gpt2(tmp_path / "in", tp=1, stages=even(2)) / "mp_rank_00" / FILE
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.write(file, f"release/mp_rank_00/{FILE}")
    data = archive.read_bytes()
    for damage in (b"\x00", b"\xff" * 200):  # other numbers, and no compressed numbers at all
        middle = len(data) // 2
        archive.write_bytes(data[:middle] + damage + data[middle + len(damage) :])
        with pytest.raises(CheckpointError, match="zip file .* cannot be unpacked"):
            weights_of(archive)
