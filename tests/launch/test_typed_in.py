"""A program that is typed in runs in one process, and says how it runs in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT

_TYPED = """
import torch
from lightning.pytorch import Trainer
from lightning_megatron import MegatronModule
sizes = {"n_layer": 1, "n_embd": 16, "n_head": 1, "vocab_size": 50, "n_positions": 8, "bos_token_id": 0}
model = MegatronModule(model={"model_type": "gpt2", **sizes, "eos_token_id": 0})
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
try: Trainer(accelerator="cpu", devices=2, strategy="megatron_pp2", **quiet)
except ValueError as error: print(type(error).__name__, error)

trainer = Trainer(accelerator="cpu", devices=1, strategy="megatron", max_steps=2, **quiet)
rows = [{"input_ids": torch.arange(i, i + 8)} for i in range(4)]
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=2))
print("steps:", trainer.global_step)
"""


def test_an_interactive_session_trains_on_one_device_and_tells_how_to_use_more(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=_TYPED,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=180,
    )
    assert "steps: 2" in done.stdout, done.stderr
    assert "ConfigError devices=2 needs a script" in done.stdout
    assert "torchrun --nproc-per-node 2 FILE.py" in done.stdout
