"""Too many or too few processes are refused on all of them, before one waits for another."""

import sys
import time

import pytest

from tests.cli.command import leave_torchrun
from tests.ranks import run_ranks


def _refusal(devices: int) -> str:
    from lightning.pytorch import Trainer

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        Trainer(accelerator="cpu", devices=devices, strategy=MegatronStrategy(tp=2), logger=False)
    return str(refused.value)


@pytest.mark.parametrize(("started", "devices"), [(3, 2), (2, 4)])
def test_as_many_processes_as_the_run_has(started: int, devices: int) -> None:
    (told,) = set(run_ranks(_refusal, started, devices))
    assert f"{started} processes were started, and the run has {devices} (devices={devices} x" in told
    assert f"--nproc-per-node {devices}" in told


def _waiting_alone() -> tuple[str, float]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from lightning_megatron import MegatronStrategy, launch
    from lightning_megatron.errors import ConfigError
    from tests.parity.training import Case, loader_of, module_of

    lines: list[str] = []
    launch.rank_zero_info = lines.append
    strategy, quiet = MegatronStrategy(timeout=4), {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, plugins=[LightningEnvironment()], **quiet
    )
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module_of(Case()), loader_of(Case()))
    return "\n".join([*lines, str(caught.value)]), time.monotonic() - begin


def test_a_node_without_others_says_what_it_waits_for_and_gives_up_after_the_timeout() -> None:
    ((said, seconds),) = run_ranks(_waiting_alone, 1)
    assert "num_nodes=2: node 0 waits at" in said
    assert "at most 0:00:04" in said
    assert "expected 2 (num_nodes=2) within 0:00:04, got" in said
    assert seconds < 60


def _typed() -> tuple[str, int]:
    """As in a prompt of Python or a notebook, which has no script that other processes could run."""
    from lightning.pytorch import Trainer

    from tests.parity.training import Case, loader_of, module_of

    leave_torchrun()
    sys.ps1 = ">>> "
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with pytest.raises(ValueError, match="devices=2 needs a script") as refused:
        Trainer(devices=2, strategy="megatron_pp2", **quiet)
    trainer = Trainer(devices=1, strategy="megatron", max_steps=2, **quiet)
    trainer.fit(module_of(Case()), loader_of(Case()))
    return str(refused.value), trainer.global_step


def test_an_interactive_session_trains_on_one_device_and_tells_how_to_use_more() -> None:
    ((told, steps),) = run_ranks(_typed, 1)
    assert "torchrun --nproc-per-node 2 FILE.py" in told
    assert steps == 2
