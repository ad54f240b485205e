"""A launched run ends when one of its ranks is killed, and waits for what others still do at a normal end."""

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
import os
from pathlib import Path

Path(f"pid_{os.environ.get('LOCAL_RANK', '0')}").write_text(str(os.getpid()))
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


def _start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(_SCRIPT)
    return subprocess.Popen([sys.executable, "train.py"], cwd=folder, env=_environment())


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_the_other_rank_ends_when_one_is_killed_in_training(tmp_path: Path, killed: int) -> None:
    first = _start(tmp_path)
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


_ENDS = """
import os, sys, time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_megatron import MegatronModule, MegatronStrategy

rank, end = int(os.environ.get("LOCAL_RANK", "0")), sys.argv[1]
Path(f"pid_{rank}").write_text(str(os.getpid()))


class Writer(BasePredictionWriter):
    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        time.sleep(7 * trainer.global_rank)
        Path(f"predictions_{trainer.global_rank}").touch()


rows = [{"input_ids": torch.arange(8)} for _ in range(4)]
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 32}
model = MegatronModule(model={"model_type": "gpt2", **sizes, "bos_token_id": 0, "eos_token_id": 0})
options = dict(
    accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, max_steps=1,
)
loader = torch.utils.data.DataLoader(rows, batch_size=2)
Trainer(strategy=MegatronStrategy(), **options).fit(model, loader)
if end == "exception" and rank == 0:
    raise RuntimeError("rank 0 alone")
Trainer(strategy=MegatronStrategy(), callbacks=[Writer("epoch")], **options).predict(model, loader)
if rank == 1:
    time.sleep(2)
    Path("after").touch()
    sys.exit(3 if end == "failing child" else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["normal", *(pytest.param(end, marks=pytest.mark.exhaustive) for end in ("failing child", "exception"))]
)
def test_a_normal_end_of_rank_0_waits_for_what_the_others_still_do(tmp_path: Path, end: str) -> None:
    (tmp_path / "ends.py").write_text(_ENDS)
    code = subprocess.run([sys.executable, "ends.py", end], cwd=tmp_path, env=_environment(), timeout=240).returncode
    written = {path.name for path in tmp_path.iterdir()} & {"predictions_0", "predictions_1", "after"}
    assert code == (0 if end == "normal" else 1)
    assert written == (set() if end == "exception" else {"predictions_0", "predictions_1", "after"})
    assert _ends(int((tmp_path / "pid_1").read_text()), seconds=5)
