"""Does a run that Lightning launched end when one of its ranks is killed, whichever it is, and however early?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_started_by import _environment

_SCRIPT = """
import os, sys
from pathlib import Path

Path(f"pid_{os.environ.get('LOCAL_RANK', '0')}").write_text(str(os.getpid()))
if sys.argv[1] == "importing" and "LOCAL_RANK" in os.environ:
    while Path("wait").exists():
        pass

import torch
from lightning.pytorch import Callback, Trainer
from lightning_megatron import MegatronModule, MegatronStrategy


class Started(Callback):
    def on_train_batch_end(self, trainer, *args):
        Path(f"trains_{trainer.global_rank}").touch()


rows = [{"input_ids": torch.arange(16)} for _ in range(400_000)]
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
model = MegatronModule(model={"model_type": "gpt2", **sizes, "bos_token_id": 0, "eos_token_id": 0})
trainer = Trainer(
    accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2), max_steps=100_000, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[Started()],
)
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
"""


def _wait_for(what: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what.exists():
        assert time.monotonic() < deadline, f"{what.name} did not come"
        time.sleep(0.1)


def _ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.1)
    return not os.path.exists(f"/proc/{pid}")


def _start(folder: Path, moment: str) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(_SCRIPT)
    return subprocess.Popen([sys.executable, "train.py", moment], cwd=folder, env=_environment())


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_the_other_rank_ends_when_one_is_killed_in_training(tmp_path: Path, killed: int) -> None:
    first = _start(tmp_path, "training")
    try:
        _wait_for(tmp_path / "trains_0")
        _wait_for(tmp_path / "trains_1")
        second = int((tmp_path / "pid_1").read_text())
        os.kill(first.pid if killed == 0 else second, signal.SIGKILL)
        if killed == 0:
            first.wait()
            assert _ends(second, seconds=5)
        else:
            # Lightning looks after its children every few seconds.
            assert first.wait(timeout=30) != 0
    finally:
        first.kill()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_rank_whose_launcher_died_while_it_imported_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    first = _start(tmp_path, "importing")
    try:
        _wait_for(tmp_path / "pid_1")
        first.kill()
        first.wait()
        second = int((tmp_path / "pid_1").read_text())
        (tmp_path / "wait").unlink()
        assert _ends(second, seconds=60)  # it imports first
    finally:
        first.kill()
