"""A written legacy checkpoint is what Megatron-LM's layout says, number by number: compared with cuts made by hand.

Arguments, and the cuts of a T5, are compared with recorded ones in ``tests/golden``.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron.convert.convert import ConvertOptions, convert
from tests.convert.directories import tiny_bert, tiny_gpt2, tiny_llama
from tests.convert.legacy.layouts import Layout, bert, even, gpt2, llama, write
from tests.convert.legacy.written import flat, load, options


@functools.cache
def _bert() -> Any:
    return tiny_bert("PreTraining")


def _write(model: Any, folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Write ``model`` as ``folder / "legacy"``; returns its weights in Hugging Face's names."""
    model.save_pretrained(folder / "hf")
    convert(options(folder / "hf", folder / "legacy", **fields))
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


WRITTEN: dict[str, tuple[Any, Any, Layout]] = {
    "gpt2 at tp2 pp2": (tiny_gpt2, gpt2, Layout(stages=even(2, 2), tp=2)),
    "bert at tp2 pp2": (_bert, bert, Layout(stages=even(2, 2), tp=2)),
    "llama at tp2": (tiny_llama, llama, Layout(stages=even(4), tp=2)),
    "llama at tp2 pp2 vpp2": (tiny_llama, llama, Layout(stages=(((0,), (2,)), ((1,), (3,))), tp=2)),
    "llama at pp3": (tiny_llama, llama, Layout(stages=(((0, 1),), ((2,),), ((3,),)))),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_every_rank_has_what_is_cut_by_hand(tmp_path: Path, case: str) -> None:
    model, built, layout = WRITTEN[case]
    # 83 tokens, and a multiple of 8 x tp.
    layout = replace(layout, padding=13 if layout.tp == 2 else 5, padding_is_zero=True)
    write(tmp_path / "by_hand", layout, built(model()))
    num_chunks = len(layout.stages[0])
    pipeline = {"pp": len(layout.stages), "vpp": num_chunks if num_chunks > 1 else None}
    _write(model(), tmp_path, tp=layout.tp, **pipeline)

    files = sorted((tmp_path / "by_hand").rglob("model_optim_rng.pt"))
    assert len(files) == layout.tp * len(layout.stages)
    for file in files:
        by_hand, ours = load(file), load(tmp_path / "legacy" / "release" / file.parent.name / file.name)
        for chunk in (key for key in by_hand.keys() | ours.keys() if key.startswith("model")):
            theirs, found = flat(by_hand[chunk]), flat(ours[chunk])
            assert found.keys() == theirs.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in theirs.items())
            assert all(tensor.is_contiguous() for tensor in found.values())
            # Readers take layers from the front of a dictionary, and a weight before its bias.
            inside = [name for name in found if ".encoder.layers." in name]
            assert [int(name.split(".")[3]) for name in inside] == sorted(int(name.split(".")[3]) for name in inside)
            assert all(not name.endswith("bias") or f"{name[:-4]}weight" in inside[:i] for i, name in enumerate(inside))
            assert not any("final_" in name for name in [n for n in found if ".encoder." in n][: len(inside)])
    assert (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_a_llama_comes_back_from_chunks_and_from_a_distributed_optimizer(tmp_path: Path) -> None:
    expected = _write(tiny_llama(), tmp_path, pp=2, vpp=2, tp=2)
    for file in list((tmp_path / "legacy").rglob("model_optim_rng.pt")):  # as Megatron-LM of 2022 named them
        (own := file.parent.with_name(f"{file.parent.name}_000")).mkdir()
        (own / "optim.pt").touch()
        file.rename(file.with_name("model_rng.pt"))
    convert(ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "back", to="hf"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
