"""Which errors are the user's, and which rank says so?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_megatron.cli import errors as failure
from lightning_megatron.errors import ConfigError, DataError
from tests.ranks import ROOT, RankError, run_ranks


def _raised_from(outer: Exception, cause: Exception) -> Exception:
    try:
        raise outer from cause
    except Exception as error:
        return error


def test_our_errors_are_the_users_in_one_line() -> None:
    assert failure.users_mistake(ConfigError("tp=3 is\n  wrong")) == "tp=3 is wrong"
    assert failure.users_mistake(DataError("x.idx is missing")) == "x.idx is missing"


def test_a_config_error_that_caused_another_error_is_what_is_shown() -> None:
    wrapped = _raised_from(ValueError("does not validate\nagainst anything"), ConfigError("lr=-1 must be positive"))
    assert failure.users_mistake(wrapped) == "lr=-1 must be positive"


def test_an_error_that_is_its_own_cause_is_shown_once() -> None:
    error = ConfigError("on all ranks")
    assert failure.users_mistake(_raised_from(error, error)) == "on all ranks"


def test_an_error_met_while_handling_a_config_error_is_a_defect() -> None:
    error: Exception
    try:
        try:
            raise ConfigError("handled")
        except ConfigError:
            raise RuntimeError("defect")  # noqa: B904 (on purpose without "from")
    except RuntimeError as met:
        error = met
    assert failure.users_mistake(error) is None


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), FileNotFoundError("x"), RuntimeError("x")])
def test_other_errors_are_defects(error: Exception) -> None:
    assert failure.users_mistake(error) is None


def test_lightnings_misconfiguration_is_the_users() -> None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    assert failure.users_mistake(MisconfigurationException("no\nGPU")) == "no GPU"


def test_local_rank_zero_speaks_for_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert failure.report("tp=3 is wrong") == 2
    assert capsys.readouterr().err == "error: tp=3 is wrong\n"


def test_another_rank_speaks_only_if_nobody_else_ends_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(failure, "_PATIENCE_SECONDS", 0.2)
    assert failure.report("no such file here") == 2
    assert capsys.readouterr().err == "error: local rank 2: no such file here\n"


def test_another_rank_is_silent_when_rank_zero_has_ended() -> None:
    child = "import os; os.environ['LOCAL_RANK'] = '1'; from lightning_megatron.cli.errors import report; report('x')"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); import time; time.sleep(1)"
    # stderr is a pipe that both hold: run() returns when the child, too, has ended.
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.stderr == ""


def _fail_while_connected() -> None:
    import atexit
    from unittest.mock import patch

    import torch.distributed as dist

    from lightning_megatron.cli.commands import program

    dist.init_process_group("gloo")
    atexit.register(print, "the interpreter took itself apart")
    with patch("lightning_megatron.cli.commands.main", lambda: 2):
        program()


def test_a_failed_rank_ends_at_once_and_leaves_nothing_to_its_threads() -> None:
    # It leaves no result either: os._exit skips whatever would have written one.
    with pytest.raises(RankError, match="died without a result") as caught:
        run_ranks(_fail_while_connected, 2)
    assert "took itself apart" not in str(caught.value)
