"""The optimizer's state in a checkpoint is what megatron-core gathers, and comes back in another precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.checkpoint.runs import LLAMA, Run, differences, fit, read_plain_state, read_tensors, train_and_save
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

UNSHARDED: dict[str, Any] = {"distributed_optimizer": False}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
RUN = Run(model=LLAMA, module={"make_vocab_size_divisible_by": 4}, trainer={"max_steps": 2})
"""Without rows that pad the vocabulary."""


def _save_and_gather(run: Run, now: Path, before: Path) -> None:
    """Save as we do, and as Megatron does."""
    from megatron.core.optimizer import distrib_optimizer

    from lightning_megatron.checkpoint import state as module

    def gathered(optimizer: Any, models: Any, **options: Any) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.inner.sharded_state_dict(models, metadata=dict(module.SHARDING))
        return state

    trainer, _ = fit(run)
    trainer.save_checkpoint(now)
    # The step is kept in the groups, as Apex's Adam has it.
    like_apex = patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)
    with like_apex, patch.object(module, "sharded_optimizer_state", gathered):
        trainer.save_checkpoint(before)


def test_a_sharded_optimizer_writes_what_megatron_gathers(tmp_path: Path) -> None:
    now, before = tmp_path / "now.ckpt", tmp_path / "before.ckpt"
    run_ranks(_save_and_gather, 3, RUN, now, before)

    ours, theirs = read_tensors(now), read_tensors(before)
    assert differences(theirs, ours) == []
    assert differences(read_plain_state(before), read_plain_state(now)) == []
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in ours) == len(ours) // 4


@pytest.mark.parametrize(
    "optimizer",
    [{}, pytest.param(UNSHARDED, marks=pytest.mark.exhaustive)],
    ids=["sharded optimizer", "unsharded optimizer"],
)
def test_masters_become_the_weights_of_a_32_bit_run_and_the_other_way_round(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    in_16_bits, in_32_bits, back = (tmp_path / f"{name}.ckpt" for name in ("a", "b", "c"))
    run_ranks(train_and_save, 2, RUN.but(trainer=BF16), in_16_bits)
    first, *others = run_ranks(train_and_save, 3, RUN.but(strategy=optimizer, ckpt_path=str(in_16_bits)), in_32_bits)
    run_ranks(train_and_save, 2, RUN.but(trainer=BF16, ckpt_path=str(in_32_bits)), back)

    source, copy = read_tensors(in_16_bits), read_tensors(in_32_bits)
    weights = [name for name in source if not name.startswith("optimizer.")]
    assert weights
    for name in weights:
        master = source[f"optimizer.state.param.{name}"]
        assert copy[name].equal(master)
        assert not source[name].float().equal(master) or name.endswith("layer_norm_weight"), "nothing was rounded"
    assert differences(source, read_tensors(back)) == []
    for trace in others:  # every rank has the masters of all, also those that its optimizer does not hold
        mine = {name: value for name, value in trace.state.items() if name.startswith("weights.")}
        assert differences({name: first.state[name] for name in mine}, mine) == []
