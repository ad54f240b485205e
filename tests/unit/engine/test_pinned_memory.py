"""Blocks of host memory, and saves that write what is in them from where it is."""

import pytest
import torch

from lightning_megatron.checkpoint.host_buffer import HostBuffer
from lightning_megatron.engine.pinned_memory import PinnedBlock
from tests.marks import on_gpus


@pytest.mark.parametrize("device", ["cpu", on_gpus(1, "cuda")])
def test_tensors_of_a_block_have_exact_storages_in_it(device: str) -> None:
    block = PinnedBlock(4 * 1000, torch.device(device))
    whole = block.tensor(0, (1000,), torch.float32)
    part = block.tensor(4 * 10, (2, 5), torch.float32)
    assert block.is_pinned == whole.is_pinned() == part.is_pinned() == (device == "cuda")
    assert not whole.any()
    part.fill_(3.0)
    assert whole.nonzero().flatten().tolist() == list(range(10, 20))
    assert part.untyped_storage().nbytes() == 4 * 10
    assert block.tensor(0, (0, 5), torch.float32).shape == (0, 5)
    block.release()
    assert not part.is_pinned()
    assert part.eq(3.0).all()  # the memory lives as long as its tensors


@pytest.mark.parametrize("device", ["cpu", on_gpus(1, "cuda")])
def test_save_copies_what_is_not_on_the_host(device: str) -> None:
    block = PinnedBlock(4 * 1000, torch.device(device))
    state = block.tensor(0, (1000,), torch.float32)[100:200].view(4, 25)
    weight = torch.ones(3, 5, dtype=torch.bfloat16, device=device)
    memory = HostBuffer(in_place=True)
    weight_copy, state_copy = memory.copy([weight, state])
    state += 1.0
    assert torch.equal(state_copy, state)
    assert state_copy.data_ptr() == state.data_ptr()
    assert state_copy.untyped_storage().nbytes() == 4 * 100
    assert torch.equal(weight_copy, weight.cpu())
    assert not weight_copy.is_cuda
    (other_copy,) = HostBuffer().copy([state])
    state += 1.0
    assert torch.equal(other_copy, state - 1.0)
    memory.release()
