"""A model saved from any layout loads elsewhere, in files of the size asked for, and never half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron.convert import hugging_face
from lightning_megatron.convert.hugging_face import size_in_bytes
from lightning_megatron.errors import CheckpointError
from tests.convert.directories import assert_same, save_as, tensors_in, tiny_gpt2, tiny_llama
from tests.families.parity import pretrained_module
from tests.parity.training import Case, Layout, Sentences, trainer_of
from tests.ranks import RankError, run_ranks

FOUR_RANKS = Layout(tp=2, pp=2, num_microbatches=2)
TWO_RANKS = Layout(tp=2)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _validated(source: str, layout: Layout, precision: str = "32-true") -> Any:
    from torch.utils.data import DataLoader

    module = pretrained_module(source)
    loader: Any = DataLoader(Sentences(4), batch_size=4)
    trainer_of(Case(layout=layout, precision=precision)).validate(module, loader, verbose=False)
    return module


def saved(source: str, target: str, layout: Layout, max_shard_size: str | int, precision: str = "32-true") -> None:
    """Load ``source`` and save it as ``target``."""
    _validated(source, layout, precision).save_pretrained(target, max_shard_size=max_shard_size)


def saved_on_a_full_disk(source: str, target: str, layout: Layout) -> str:
    """The error of a save when no file may grow past 20 kB."""
    import resource

    module = _validated(source, layout)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        module.save_pretrained(target)
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return message


def killed_while_saving(source: str, target: str, layout: Layout) -> None:
    """End rank 0 without a word when a part of the files is written."""
    import os
    from unittest.mock import patch

    module = _validated(source, layout)
    write = hugging_face._write_weights

    def write_and_die(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
        write(folder, name, tensors)
        if any(each.endswith("layers.1.mlp.down_proj.weight") for each in tensors):
            os._exit(9)

    with patch.object(hugging_face, "_write_weights", write_and_die):
        module.save_pretrained(target, max_shard_size="20KB")


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_files_are_no_larger_than_asked_for(tmp_path: Path) -> None:
    model = tiny_llama()
    save_as(model, tmp_path / "source", "safetensors")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": True}))
    run_ranks(saved, 4, str(tmp_path / "source"), str(tmp_path / "target"), FOUR_RANKS, "20KB")
    files = sorted((tmp_path / "target").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 3
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in files)
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    loaded, report = type(model).from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert loaded.generation_config.temperature == 0.7


def test_weights_in_bf16_are_saved_in_bf16(tmp_path: Path) -> None:
    expected = save_as(tiny_gpt2(), tmp_path / "source", "safetensors")
    run_ranks(saved, 2, str(tmp_path / "source"), str(tmp_path / "target"), TWO_RANKS, "5GB", "bf16-mixed")
    assert json.loads((tmp_path / "target" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(tensors_in(tmp_path / "target"), {name: each.to(torch.bfloat16) for name, each in expected.items()})


def test_a_directory_that_exists_gets_the_new_model_and_keeps_other_files(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    save_as(tiny_llama(hidden_size=64), tmp_path / "target", "sharded_safetensors")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    run_ranks(saved, 1, str(tmp_path / "source"), str(tmp_path / "target"), Layout(), "30KB")
    run_ranks(saved, 1, str(tmp_path / "source"), str(tmp_path / "target"), Layout(), 10**6)
    names = {file.name for file in (tmp_path / "target").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    assert load_file(tmp_path / "target" / "model.safetensors")["model.norm.weight"].shape == (32,)


def test_a_full_disk_is_an_error_on_all_ranks_and_the_old_model_stays(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    expected = save_as(tiny_llama(hidden_size=64), tmp_path / "full", "safetensors")
    arguments = (str(tmp_path / "source"), str(tmp_path / "full"), FOUR_RANKS)
    messages = run_ranks(saved_on_a_full_disk, 4, *arguments)
    assert all("is not written" in message and "File too large" in message for message in messages)
    names = {file.name for file in (tmp_path / "full").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}
    assert_same(tensors_in(tmp_path / "full"), expected)


def test_a_killed_save_leaves_nothing_of_its_own_under_a_final_name(tmp_path: Path) -> None:
    save_as(tiny_llama(), tmp_path / "source", "safetensors")
    save_as(tiny_llama(hidden_size=64), tmp_path / "old", "sharded_safetensors")
    before = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    for target in ("old", "new"):
        with pytest.raises(RankError, match="died without a result"):
            run_ranks(killed_while_saving, 2, str(tmp_path / "source"), str(tmp_path / target), TWO_RANKS)
    assert not (tmp_path / "new").exists()
    after = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir() if file.is_file()}
    assert after == before
    run_ranks(saved, 2, str(tmp_path / "source"), str(tmp_path / "new"), TWO_RANKS, "20KB")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "old", "new"}


def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    save_as(tiny_gpt2(), tmp_path / "source", "safetensors")
    (tmp_path / "target").write_text("")
    with pytest.raises(RankError, match="is a file") as caught:
        run_ranks(saved, 2, str(tmp_path / "source"), str(tmp_path / "target"), TWO_RANKS, "5GB")
    assert caught.value.error_type == "CheckpointError"


# ---- without ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200MB", 200_000_000), ("5GB", 5 * 10**9), ("1.5 GiB", 3 << 29), ("10kb", 10_000), (1000, 1000), ("7", 7)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert size_in_bytes(text) == expected
