"""Restarted ranks find each other and resume from the last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.rendezvous import TCPStore

from tests.cli.command import run_cli
from tests.cli.corpus import configuration
from tests.launch.test_started_by import has_ended, script_environment
from tests.ranks import run_ranks


def _sum_of_ranks(port: int, last: int) -> float:
    """All-reduce as a torchrun worker whose agent's store is at ``port``; rank ``last`` starts later."""
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    from lightning_megatron.run.rendezvous import connect_ranks

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environment = TorchElasticEnvironment()
    rank = environment.global_rank()
    time.sleep(1 if rank == last else 0)
    connect_ranks(
        environment,
        1,
        torch.device("cpu"),
        timedelta(seconds=60),
        timedelta(seconds=60),
    )
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return float(total)


def test_ranks_connect_after_restarts_with_other_world_sizes() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for world_size, last in (
        (2, 0),
        (2, 1),
        (3, 0),
        (1, 0),
    ):
        expected = world_size * (world_size - 1) / 2
        assert run_ranks(_sum_of_ranks, world_size, agent.port, last) == [expected] * world_size


def _wait_for_another_rank() -> str:
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    from lightning_megatron.errors import ConfigError
    from lightning_megatron.run.rendezvous import connect_ranks

    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    limit = timedelta(seconds=2)
    try:
        connect_ranks(TorchElasticEnvironment(), 1, torch.device("cpu"), limit, limit)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_come_names_the_option_that_limits_the_wait() -> None:
    (message,) = run_ranks(_wait_for_another_rank, 1)
    assert "expected 2 (num_nodes=1) within 0:00:02, got" in message
    assert "raise MegatronStrategy(timeout=...)" in message
    assert "MASTER_ADDR" not in message


def _interrupted_while_waiting() -> bool:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        _wait_for_another_rank()
    except KeyboardInterrupt:
        return True
    return False


def test_ctrl_c_interrupts_a_rank_that_waits_for_others() -> None:
    assert run_ranks(_interrupted_while_waiting, 1) == [True]


_SUPERVISED = """
import sys
import threading
from lightning_megatron.run.restarts import supervise
sys.exit(supervise([sys.executable, "-c", sys.argv[1]], int(sys.argv[2])))
"""
_DIES = """
import os, pathlib, subprocess, sys
from lightning_megatron.run.restarts import is_of_this_run
starts = pathlib.Path("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
pathlib.Path("is_of_this_run").write_text(str(is_of_this_run(starts.stat().st_mtime)))
sleeps = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
pathlib.Path("left").write_text(str(sleeps.pid))
code = int(sys.argv[1]) if len(starts.read_text()) < 3 else 0
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@pytest.mark.parametrize(
    ("code", "max_restarts", "exit_code", "starts"),
    [
        (-9, 3, 0, 3),
        (1, 1, 1, 2),
        (-9, 1, 137, 2),
        (2, 3, 2, 1),
        (143, 3, 143, 1),
    ],
)
def test_killed_and_failed_processes_are_restarted(
    code: int, max_restarts: int, exit_code: int, starts: int, tmp_path: Path
) -> None:
    script = _DIES.replace("sys.argv[1]", repr(str(code)))
    command = [sys.executable, "-c", _SUPERVISED, script, str(max_restarts)]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == exit_code, ran.stderr
    assert (tmp_path / "starts").read_text() == "x" * starts
    assert (tmp_path / "is_of_this_run").read_text() == str(starts > 1)
    lines = ran.stderr.splitlines()
    reason = "was ended by SIGKILL" if code < 0 else f"ended with code {code}"
    expected = [f"restart {n} of {max_restarts}" for n in range(1, starts)]
    expected += ["no restart is left"] if exit_code in (1, 137) else []
    assert [line.rpartition("; ")[2] for line in lines] == expected
    assert all(line.startswith(f"error: local rank 0 {reason} at ") for line in lines)
    left = int((tmp_path / "left").read_text())
    if exit_code == 0:
        os.kill(left, signal.SIGKILL)  # children of a successful run are left alone
    assert has_ended(left, seconds=30)


def test_sigterm_is_forwarded_and_ends_the_restarts(tmp_path: Path) -> None:
    waits = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); "
    )
    waits += "pathlib.Path('up').touch(); time.sleep(60)"
    command = [sys.executable, "-c", _SUPERVISED, waits, "3"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=script_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=200) == 5


def test_invalid_max_restarts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run_cli(tmp_path, "fit", "--max-restarts", "-1")
    assert (code, err) == (
        2,
        "error: --max-restarts: expected at least 0, got -1; give 0 or more\n",
    )
    monkeypatch.setenv("SLURM_NTASKS", "2")
    code, _, err = run_cli(tmp_path, "fit", "--max-restarts", "2")
    assert code == 2
    assert "expected no other launcher, got SLURM_NTASKS in the environment" in err


_USERS = """
import json, os, signal, time
from pathlib import Path
from lightning.pytorch import Callback

class Fails(Callback):
    def __init__(self, how: str, rank: int):
        self.how, self.rank = how, rank

    def on_train_batch_end(self, trainer, module, outputs, *rest):
        if trainer.global_rank == 0:
            with open("steps", "a") as file:
                print(json.dumps([trainer.global_step, float(outputs["loss"]), time.time()]), file=file)
        if trainer.global_rank == self.rank and trainer.global_step == 5 and not Path("failed").exists():
            Path("failed").write_text(str(time.time()))
            time.sleep(600) if self.how == "sleeps" else os.kill(os.getpid(), getattr(signal, self.how))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        ("SIGKILL", 1, "error: local rank 1 was ended by SIGKILL"),
        ("sleeps", 1, "error: rank 1 hangs: expected progress within"),
        ("SIGSTOP", 0, "error: rank 0 hangs, whose store has not answered"),
    ],
)
def test_fit_resumes_after_a_failed_or_hung_rank(
    corpus: Path, tmp_path: Path, how: str, rank: int, message: str
) -> None:
    (tmp_path / "users.py").write_text(_USERS)
    heartbeat = {"setup": 15, "step": 10, "checkpoint": 15}
    config = configuration(corpus, tmp_path)
    config["trainer"] |= {
        **{"devices": 2, "max_steps": 6, "limit_val_batches": 0},
        "strategy": {
            "class_path": "MegatronStrategy",
            "init_args": {"tp": 2, "heartbeat": heartbeat},
        },
        "callbacks": [
            {"class_path": "users.Fails", "init_args": {"how": how, "rank": rank}},
            {
                "class_path": "ModelCheckpoint",
                "init_args": {"every_n_train_steps": 2, "save_last": "link"},
            },
        ],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "lightning_megatron",
        "fit",
        "--config",
        "config.yaml",
        "--max-restarts",
        "2",
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr
    assert message in ran.stderr
    assert "; restart 1 of 2\n" in ran.stderr
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    first = steps[:-2]
    again = steps[-2:]
    assert [step for step, *_ in again] == [
        5,
        6,
    ]  # from step 4, saved in another version directory
    assert [step for step, *_ in first][:4] == [1, 2, 3, 4]
    if len(first) == 5:  # rank 0 may have finished step 5 before rank 1 failed
        assert first[4][1] == again[0][1]
    seconds = again[0][2] - float((tmp_path / "failed").read_text())
    print(f"{how} to first new step: {seconds:.1f} s")
    assert seconds < 60, f"{how} to first new step: {seconds:.0f} s"
