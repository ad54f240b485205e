"""Weights get onto GPUs and back, over NCCL, in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.convert.directories import save_as, tiny_gpt2, tiny_llama
from tests.families.parity import pretrained_module
from tests.parity.training import Case, Layout, Sentences, trainer_of
from tests.ranks import run_ranks


def saved_from_gpus(source: str, target: str, layout: Layout) -> int:
    """Train one step, so that Megatron's buffers hold the weights, at a rate of 0; then save."""
    from torch.utils.data import DataLoader

    module = pretrained_module(source, lr=1e-30)
    case = Case(layout=layout, precision="bf16-mixed", accelerator="gpu", steps=1)
    trainer_of(case).fit(module, DataLoader(Sentences(8), batch_size=4 // layout.dp))
    module.save_pretrained(target, max_shard_size="20KB")
    return sum(p.numel() for p in module.parameters() if p.is_cuda)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, num_microbatches=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_get_onto_gpus_and_back(tmp_path: Path, family: str, layout: Layout) -> None:
    model = (tiny_gpt2() if family == "gpt2" else tiny_llama()).to(torch.bfloat16)
    save_as(model, tmp_path / "source", "safetensors")
    on_gpus = run_ranks(saved_from_gpus, 2, str(tmp_path / "source"), str(tmp_path / "target"), layout)
    assert all(on_gpus)
    loaded, report = type(model).from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
