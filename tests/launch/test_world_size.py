"""Are too many or too few processes refused on all of them, before one waits for another?"""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks


def _refusal(devices: int) -> str:
    from lightning.pytorch import Trainer

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.errors import ConfigError

    try:
        Trainer(accelerator="cpu", devices=devices, strategy=MegatronStrategy(tp=2), logger=False)
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(("started", "devices"), [(3, 2), (2, 4), (2, 2)])
def test_as_many_processes_as_the_run_has(started: int, devices: int) -> None:
    answers = run_ranks(_refusal, started, devices)
    assert len(set(answers)) == 1
    if started == devices:
        assert answers[0] == "taken"
    else:
        assert f"{started} processes were started, and the run has {devices} (devices={devices} x" in answers[0]
        assert f"--nproc-per-node {devices}" in answers[0]
