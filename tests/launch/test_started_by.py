"""A script trains and saves alike, however its processes are started, without a ``__main__`` guard too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

_TIMEOUT_SECONDS = 180

# No __main__ guard: Megatron's own checkpoint writer would start this script again while it saves, and hang.
_SCRIPT = """
import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_megatron import MegatronModule, MegatronStrategy

seed_everything(3, verbose=False)
rows = [{"input_ids": torch.arange(i, i + 16) % 50} for i in range(8)]
model = MegatronModule(
    model={"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16,
           "bos_token_id": 0, "eos_token_id": 0},
    lr=1e-2,
)
trainer = Trainer(
    accelerator="cpu", devices=2, strategy=MegatronStrategy(pp=2, num_microbatches=2), max_steps=2, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
trainer.save_checkpoint("saved.ckpt")
with open(f"rank_{trainer.global_rank}.txt", "a") as file:
    file.write(f"{trainer.callback_metrics['train_loss'].item()!r}\\n")
"""

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def _environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def _slurm(rank: int) -> dict[str, str]:
    return _environment(
        SLURM_JOB_ID="7070",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        SLURM_NODELIST="localhost",
        SLURM_STEP_NODELIST="localhost",
    )


def _start(how: str, script: Path) -> list[subprocess.Popen[str]]:
    command = [sys.executable, str(script)]
    if how == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environments = [_slurm(0), _slurm(1)] if how == "slurm" else [_environment()]
    return [
        subprocess.Popen(
            command, cwd=script.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for env in environments
    ]


@pytest.mark.parametrize(
    "how", ["lightning", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("torchrun", "slurm"))]
)
def test_a_script_without_a_guard_trains_and_saves_once(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    processes = _start(how, script)
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    for nobody_can_change_it in ("Warning", "is deprecated", "💡"):
        assert not any(nobody_can_change_it in output for output in outputs), outputs
    # One line: the script ran once in each rank. The loss is that of both, and of every way of starting.
    losses = [(tmp_path / f"rank_{rank}.txt").read_text().split() for rank in (0, 1)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
    assert 2.5 < float(losses[0][0]) < 4.0  # from ln 50 = 3.9 downwards
    assert (tmp_path / "saved.ckpt" / "meta.pt").is_file()
