"""A preempted run resumes exactly: SIGTERM, and SLURM's requeue signal."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpoint.runs import (
    Run,
    Trace,
    assert_exact_resume,
    callback,
    checkpoints_at,
    fit,
    make_corpus,
    rows_dataset,
    train,
    train_with_checkpoints,
)
from tests.cli.command import run_cli
from tests.cli.corpus import configuration
from tests.launch.test_started_by import script_environment, slurm_variables
from tests.ranks import run_ranks

SIX_STEPS = Run(strategy={"tp": 2}, trainer={"max_steps": 6})


def _send_signal(
    signum: int,
    ranks: tuple[int, ...],
    step: int,
    times: int = 1,
) -> Any:
    """Callback that signals its own process at the end of a step; -1: during the validation after step 4."""

    def send(trainer: Any, *_: Any) -> None:
        if trainer.global_step == (4 if step == -1 else step) and trainer.global_rank in ranks:
            for _time in range(times):
                os.kill(os.getpid(), signum)

    return callback(**{"on_validation_batch_end" if step == -1 else "on_train_batch_end": send})


def _preempt(
    run: Run,
    folder: Path,
    keep: dict[str, Any],
    sent: dict[str, Any],
) -> tuple[Any, list[str]]:
    """Exit code and checkpoints of a run that gets SIGTERM."""
    code = None
    try:
        fit(
            run,
            checkpoints_at(folder, **keep),
            _send_signal(signal.SIGTERM, **sent),
        )
    except SystemExit as ended:
        code = ended.code
    return code, sorted(path.name for path in folder.glob("*.ckpt"))


_LINKED = {"save_last": "link", "save_top_k": 1, "every_n_train_steps": 2}
_NEVER = {"every_n_train_steps": 100}
_WITH_VALIDATION = SIX_STEPS.but(
    validate=True, trainer={"val_check_interval": 2, "check_val_every_n_epoch": None}
)


@pytest.mark.parametrize(
    ("run", "sent", "keep", "left", "first_steps"),
    [
        # The signal comes in step 1, ranks agree on it in step 2, and step 3 is the last.
        pytest.param(
            SIX_STEPS,
            {"ranks": (1,), "step": 1},
            _NEVER,
            ["last.ckpt"],
            (4,),
            id="without save_last",
        ),
        pytest.param(
            SIX_STEPS,
            {"ranks": (0, 1), "times": 2, "step": 1},
            _LINKED,
            ["last.ckpt", "preempted.ckpt", "step=2.ckpt"],
            (4,),
            id="both ranks, twice, link",
        ),
        pytest.param(
            _WITH_VALIDATION,
            {"ranks": (1,), "step": -1},
            {"save_last": True, **_NEVER},
            ["last.ckpt"],
            (5, 6),
            id="while validating",
        ),
    ],
)
def test_sigterm_saves_and_the_resumed_run_is_exact(
    tmp_path: Path,
    run: Run,
    sent: dict[str, Any],
    keep: dict[str, Any],
    left: list[str],
    first_steps: tuple[int, ...],
) -> None:
    expected = run_ranks(train, 2, run)

    preempted = run_ranks(
        _preempt,
        2,
        run.but(strategy={"async_save": True}),
        tmp_path,
        keep,
        sent,
    )

    assert preempted == [(143, left)] * 2
    resumed = run_ranks(
        train_with_checkpoints,
        2,
        run.but(ckpt_path="last"),
        tmp_path,
        keep,
    )
    assert_exact_resume(expected, resumed, *first_steps)


def _finished_validations(run: Run, folder: Path, *others: Any) -> list[int]:
    """Steps after which a run has finished a validation of four batches."""
    from torch.utils.data import DataLoader

    from lightning_megatron import MegatronModule

    class WithValidation(MegatronModule):
        def val_dataloader(self) -> Any:
            return DataLoader(rows_dataset(8), batch_size=2)

    steps: list[int] = []
    record = callback(on_validation_end=lambda trainer, _: steps.append(trainer.global_step))
    saver = checkpoints_at(folder, every_n_train_steps=None, monitor="val_loss")
    with contextlib.suppress(SystemExit):
        fit(run, record, saver, *others, module_class=WithValidation)
    return steps


def _interrupt_a_validation(folder: Path) -> list[list[int]]:
    run = Run(
        trainer={"max_epochs": 1, "val_check_interval": 2, "num_sanity_val_steps": 0},
    )
    sigterm = _send_signal(signal.SIGTERM, (0,), -1)
    resumed = run.but(ckpt_path=str(folder / "last.ckpt"))
    from_its_end = run.but(ckpt_path=str(folder / "step=4.ckpt"))
    return [
        _finished_validations(run, folder, sigterm),
        _finished_validations(resumed, folder),
        _finished_validations(from_its_end, folder),
    ]


def test_interrupted_validation_is_repeated_once(tmp_path: Path) -> None:
    assert run_ranks(_interrupt_a_validation, 1, tmp_path) == [[[2], [4], []]]


def _in_slurm(
    run: Run,
    root: Path,
    signals: bool,
    restarts: int,
) -> Trace:
    """Train as one of two SLURM tasks; with ``signals``, rank 1 gets the requeue signal in step 2."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    variables = slurm_variables(int(os.environ["RANK"]))
    os.environ |= {
        **variables,
        "SLURM_RESTART_COUNT": str(restarts),
        "PATH": f"{root}:{os.environ['PATH']}",
    }
    run = run.but(
        trainer={
            "plugins": [SLURMEnvironment(auto_requeue=True)],
            "default_root_dir": str(root),
        }
    )
    return fit(
        run,
        *([_send_signal(signal.SIGUSR1, (1,), 2)] if signals else []),
    )[1]


def test_slurm_requeue_signal_saves_and_the_resumed_run_is_exact(tmp_path: Path) -> None:
    """The requeued run does not start again from its pretrained weights."""
    pretrained = tmp_path / "pretrained.ckpt"
    root = tmp_path / "job"
    root.mkdir()
    (root / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {root}/called.txt\n')
    (root / "scontrol").chmod(0o700)
    run = SIX_STEPS.but(indexed=make_corpus(tmp_path))
    run_ranks(
        train,
        2,
        run.but(trainer={"max_steps": 2}),
        pretrained,
    )
    run = run.but(
        strategy={"async_save": True, "load_weights_only": True}, ckpt_path=str(pretrained)
    )

    expected = run_ranks(_in_slurm, 2, run, root, True, 0)

    assert [min(trace.steps) for trace in expected] == [1, 1]
    assert (root / "called.txt").read_text() == "requeue 7070\n"
    (
        root / "hpc_ckpt_2.ckpt.partial"
    ).mkdir()  # a killed save, which Lightning takes for the newest checkpoint
    assert_exact_resume(
        expected,
        run_ranks(_in_slurm, 2, run, root, False, 1),
        4,
    )


def test_sigterm_ends_the_command_with_143_and_its_checkpoint_resumes(
    corpus: Path, tmp_path: Path
) -> None:
    """SIGTERM goes to the process that started the other rank; the logger makes a directory for each run."""
    config = configuration(corpus, tmp_path)
    saver = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1}}
    config["trainer"] |= {
        "default_root_dir": str(tmp_path),
        "devices": 2,
        "max_steps": 100_000,
        "limit_val_batches": 0,
        "callbacks": [saver],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "lightning_megatron",
        "fit",
        "--config",
        "config.yaml",
        "--ckpt_path",
        "last",
    ]
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=script_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while run.poll() is None and not any(tmp_path.rglob("version_0/checkpoints/*.ckpt")):
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=200)
    finally:
        run.kill()

    assert run.returncode == 143, err
    (line,) = [line for line in err.splitlines() if "SIGTERM at step" in line]
    assert line.endswith(
        f"code 143; its checkpoint is {tmp_path}/last.ckpt, resume with ckpt_path='last'"
    )
    step = int(line.split("SIGTERM at step ")[1].split(":")[0])
    more = ["--trainer.max_steps", str(step + 2), "--trainer.devices", "1"]
    code, _, err = run_cli(tmp_path, *command[3:], *more)
    assert code == 0, err
    assert f"Restored all states from the checkpoint at {tmp_path}/last.ckpt" in err
    assert any(tmp_path.rglob(f"version_1/checkpoints/*step={step + 2}.ckpt"))
