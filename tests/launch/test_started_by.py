"""A script trains, saves and predicts the same under every launcher, and no rank is left running alone."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_megatron.cli import commands
from lightning_megatron.errors import ConfigError
from lightning_megatron.run import launch
from lightning_megatron.run.failures import FailureReport
from lightning_megatron.run.restarts import LAUNCHER
from tests.marks import exhaustive
from tests.ranks import ROOT, run_ranks

# Deliberately without a __main__ guard: Megatron's own checkpoint writer would start such a script again, and hang.
_SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_megatron import MegatronModule, MegatronStrategy

end, rank = sys.argv[1], int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))
Path(f"pid_{rank}").write_text(str(os.getpid()))


class Ends(BasePredictionWriter):
    def on_train_batch_end(self, trainer, *rest):
        if end.startswith(f"rank {1 - rank} is killed"):
            os.kill(int(Path(f"pid_{1 - rank}").read_text()), signal.SIGKILL)

        if end == "rank 1 is killed while rank 0 sleeps" and rank == 0:
            time.sleep(300)

        if end == "rank 1 exits" and rank == 1:
            sys.exit(5)

        if end == "a callback of rank 1" and rank == 1:
            raise KeyError("no such key")

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        time.sleep(7 * trainer.global_rank)
        Path(f"predictions_{trainer.global_rank}").touch()


seed_everything(3, verbose=False)
rows = [{"input_ids": torch.arange(i, i + 16) % 50} for i in range(8)]
model = MegatronModule(
    model={"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16,
           "bos_token_id": 0, "eos_token_id": 0},
    lr=1e-2,
)
loader = torch.utils.data.DataLoader(rows, batch_size=4)
options = dict(
    accelerator="cpu", devices=2, max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, callbacks=[Ends("epoch")],
)
trainer = Trainer(strategy=MegatronStrategy(pp=2, num_microbatches=2), **options)
trainer.fit(model, loader)
trainer.save_checkpoint("saved.ckpt")
model.save_pretrained("exported")
with open(f"rank_{rank}.txt", "a") as file:
    file.write(f"{trainer.callback_metrics['train_loss'].item()!r}\\n")
if end == "an exception" and rank == 0:
    raise RuntimeError("rank 0 alone")
# Its weights are loaded by modules of transformers that nothing has imported yet.
exported = MegatronModule(model="exported", pretrained=True)
trainer = Trainer(strategy=MegatronStrategy(), **options)
trainer.validate(exported, loader, verbose=False)
trainer.predict(exported, loader)
if rank == 1:
    time.sleep(2)
    Path("after").touch()
    sys.exit(3 if end == "a failing child" else 0)
"""

_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
)


def script_environment(**more: str) -> dict[str, str]:
    """Environment of a process that a user starts."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def slurm_variables(
    rank: int,
    num_nodes: int = 1,
    nodes: str = "localhost",
) -> dict[str, str]:
    """Variables that SLURM sets for one of two tasks."""
    task = {
        "NODEID": rank // (2 // num_nodes),
        "LOCALID": rank % (2 // num_nodes),
        "PROCID": rank,
    }
    job = {
        "JOB_ID": 7070,
        "JOB_NAME": "train",
        "NTASKS": 2,
        "NTASKS_PER_NODE": 2 // num_nodes,
        "NODELIST": nodes,
    }
    return {
        f"SLURM_{name}": str(value)
        for name, value in {**job, **task, "STEP_NODELIST": nodes}.items()
    }


def has_ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.1)
    return not os.path.exists(f"/proc/{pid}")


def _run(
    how: str,
    end: str,
    folder: Path,
) -> tuple[list[int], str]:
    """Exit codes of the processes started here, and the output of all processes."""
    (folder / "train.py").write_text(_SCRIPT)
    starts = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if how == "torchrun" else []
    command = [sys.executable, *starts, "train.py", end]
    environments = [slurm_variables(rank) for rank in (0, 1)] if how == "slurm" else [{}]
    with (folder / "printed.txt").open("w") as printed:
        processes = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=script_environment(**env),
                stdout=printed,
                stderr=printed,
            )
            for env in environments
        ]
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
    return codes, (folder / "printed.txt").read_text()


@pytest.mark.parametrize(
    "how",
    [
        "lightning",
        *(exhaustive(how) for how in ("torchrun", "slurm")),
    ],
)
def test_unguarded_script_runs_once_per_rank_under_every_launcher(how: str, tmp_path: Path) -> None:
    codes, printed = _run(how, "normal", tmp_path)
    assert not any(codes), printed
    for noise in ("Warning", "is deprecated", "💡"):
        assert noise not in printed, printed
    assert printed.count("Starting 1 more process, ") == (how == "lightning"), printed
    # Lightning's warning about two replicas: once, not once per rank.
    assert printed.count("During `trainer.validate()`") == 1, printed
    # One line: the script ran once in each rank. The loss is the same on both ranks.
    losses = [(tmp_path / f"rank_{rank}.txt").read_text().split() for rank in (0, 1)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
    assert 2.5 < float(losses[0][0]) < 4.0  # below ln 50 = 3.9
    for name in ("saved.ckpt/meta.pt", "predictions_0", "predictions_1", "after"):
        assert (tmp_path / name).exists(), name


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("rank 1 is killed", 1, "error: local rank 1 was ended by SIGKILL"),
        exhaustive(
            "rank 1 is killed while rank 0 sleeps",
            1,
            "error: local rank 1 was ended by SIGKILL, and the others end with it",
        ),
        exhaustive(
            "rank 1 exits", 1, "error: local rank 1 ended with code 5, and rank 0 ends with it"
        ),
        exhaustive("rank 0 is killed", -9, ""),
        exhaustive("an exception", 1, "RuntimeError: rank 0 alone"),
        exhaustive("a failing child", 1, "error: local rank 1 ended with code 3"),
    ],
)
def test_no_rank_is_left_running_alone(
    end: str,
    code: int,
    message: str,
    tmp_path: Path,
) -> None:
    begin = time.monotonic()
    codes, printed = _run("lightning", end, tmp_path)
    assert codes == [code], printed
    assert message in printed
    assert has_ended(int((tmp_path / "pid_1").read_text()), seconds=30)
    assert (tmp_path / "after").exists() == (end == "a failing child")
    # The launcher looks at its children every second, and rank 0 has 10 more to end by itself.
    assert time.monotonic() - begin < 120


@pytest.mark.parametrize(("code", "lines"), [(143, 0), (3, 1)])
def test_rank_that_is_preempted_ends_no_other(
    code: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local rank 0 may still upload logs when the others have ended."""
    printed: list[str] = []
    monkeypatch.setattr(launch, "_UNWIND_SECONDS", 0.0)
    monkeypatch.setattr(launch, "_exit", printed.append)
    rank = subprocess.Popen(["sh", "-c", f"exit {code}"])
    launch._end_with_failed_rank([rank])
    assert len(printed) == lines


@pytest.mark.parametrize("how", ["lightning", exhaustive("torchrun")])
def test_last_line_names_the_rank_that_failed_and_its_exception(how: str, tmp_path: Path) -> None:
    codes, printed = _run(how, "a callback of rank 1", tmp_path)
    assert codes == [1], printed
    line = r"error: rank 1 failed: KeyError: 'no such key' \(train.py:\d+ in on_train_batch_end\)"
    lines = [each for each in printed.splitlines() if each.strip(" =")]
    if how == "torchrun":  # its summary shows the traceback of the rank that failed first
        assert re.fullmatch(rf"\s*{line}", lines[-1]), printed
        return
    # The traceback of rank 1, whose lines torch marks, ends with the line; rank 0 has no traceback.
    assert re.fullmatch(rf"(\[rank1\]: )?{line}", lines[-2]), printed
    assert re.fullmatch(rf"{line}; rank 0 ends with it", lines[-1]), printed
    assert printed.count("Traceback (most recent call last)") == 1, printed


def _message_where_connection_is_lost(error: Exception) -> str | None:
    """On rank 0, after rank 1 has failed with ``error``: the message of a user error."""
    import torch.distributed as dist

    from lightning_megatron.errors import user_error
    from lightning_megatron.run.failures import FailureReport

    dist.init_process_group("gloo")
    failures = FailureReport()
    if dist.get_rank() == 1:
        failures.announce(error)
    dist.barrier()
    lost = RuntimeError("Connection closed by peer")
    if dist.get_rank() == 0:
        failures.announce(lost)
    return user_error(lost)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        # With it a command ends with code 2.
        (
            ConfigError("x: expected 1, got 2; correct it"),
            "rank 1: x: expected 1, got 2; correct it",
        ),
        exhaustive(KeyError("x"), None),
    ],
    ids=str,
)
def test_user_error_of_one_rank_is_that_of_all(error: Exception, message: str | None) -> None:
    first, _ = run_ranks(_message_where_connection_is_lost, 2, error)
    assert first == message


@pytest.mark.parametrize(("code", "printed"), [(2, False), (1, True)])
def test_user_error_that_another_rank_has_printed_is_not_repeated(
    code: int,
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a command, whose rank ends with code 2 after its line; a rank that has lost the connection ends with 1."""
    lost = RuntimeError("Connection closed by peer")
    launcher = launch.ScriptLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [subprocess.Popen(["sh", "-c", f"exit {code}"])]
    monkeypatch.setattr(launch.ScriptLauncher, "_start_other_ranks", lambda _: None)
    monkeypatch.setattr(launch.ScriptLauncher, "_wait_for_other_ranks", lambda _: None)
    monkeypatch.setattr(launch.ScriptLauncher, "_has_failed", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv(LAUNCHER, "")

    def run(*_: object) -> None:
        def fit(ckpt_path: object, datamodule: object) -> None:
            raise lost

        try:
            launcher.launch(fit, None, None, trainer=mock.Mock())
        finally:
            run_of_rank_0.announce(lost)

    run_of_rank_0 = FailureReport()
    of_rank_1 = json.dumps([1, "ConfigError: x: got 2", "x: got 2"])
    store = mock.Mock(**{"check.return_value": True, "compare_set.return_value": of_rank_1})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(commands, "_run_trainer_command", run)
    assert commands.main(["fit"]) == 2
    line = "error: rank 1: x: got 2\n"
    assert capsys.readouterr().err == line * printed


_TRAINS_ON = """
import os
import time
from pathlib import Path

from lightning_megatron import MegatronStrategy

MegatronStrategy()
Path(f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(300)
"""
_WRAPPER = f"""
[ $RANK = 0 ] && exec {sys.executable} trains_on.py
{sys.executable} trains_on.py
exit $?
"""


@pytest.mark.exhaustive
def test_ranks_end_with_a_killed_torchrun_whose_children_they_are_or_not(tmp_path: Path) -> None:
    """Rank 0 is a child of torchrun's agent; between the agent and rank 1 there is a shell, which survives it."""
    (tmp_path / "trains_on.py").write_text(_TRAINS_ON)
    (tmp_path / "wrapper.sh").write_text(_WRAPPER)
    starts = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--no-python",
        "sh",
        "wrapper.sh",
    ]
    with (tmp_path / "printed.txt").open("w") as printed:
        torchrun = subprocess.Popen(
            [sys.executable, *starts],
            cwd=tmp_path,
            env=script_environment(),
            stdout=printed,
            stderr=printed,
        )
    files = [tmp_path / f"pid_{rank}" for rank in range(2)]
    deadline = time.monotonic() + 120
    while (
        not all(file.exists() and file.read_text() for file in files)
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    time.sleep(0.5)
    torchrun.kill()
    torchrun.wait()
    assert all(has_ended(int(file.read_text()), seconds=20) for file in files)
    line = f"error: rank 1: the launcher (process {torchrun.pid}) has ended, so this rank ends, too"
    assert line in (tmp_path / "printed.txt").read_text()
