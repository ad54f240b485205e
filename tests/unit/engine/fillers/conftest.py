"""One rank's worth of Megatron in the pytest process, for layers and optimizers that ask for their groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_rank() -> Iterator[None]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from lightning_megatron.engine.runtime import emulated_cuda

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with emulated_cuda():
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(7, force_reset_rng=True)
            yield
            parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()
