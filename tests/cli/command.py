"""Run commands in ranks, which have Lightning and the engine preloaded."""

import io
import os
import warnings
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks


def run_cli(
    folder: Path | str,
    *arguments: object,
    ranks: int = 1,
) -> tuple[int, str, str]:
    """Run a command in ``folder``, in one process or as ``ranks`` processes of torchrun.

    Returns:
        Exit code, stdout and stderr of the first process. The others must print nothing to stdout.
    """
    first, *others = run_ranks(
        run_here,
        ranks,
        str(folder),
        [[str(each) for each in arguments]],
    )
    assert all(out == "" for ((_, out, _),) in others)
    result: tuple[int, str, str] = first[0]
    return result


def run_all(folder: Path | str, commands: Iterable[Iterable[object]]) -> list[tuple[int, str, str]]:
    """Run commands one after another in one process, which is cheap for refused ones; returns as ``run_cli``."""
    (results,) = run_ranks(
        run_here, 1, str(folder), [[str(each) for each in arguments] for arguments in commands]
    )
    return list(results)


def run_here(folder: str, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Like ``run_all``, in the calling rank."""
    if os.environ.get("WORLD_SIZE") == "1":
        leave_torchrun()
    os.chdir(folder)
    return [_main(arguments) for arguments in commands]


def _main(arguments: list[str]) -> tuple[int, str, str]:
    from lightning_megatron.cli import main

    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        _send_logs_to(err)
        warnings.filterwarnings("ignore", "The `srun` command")
        try:
            code = main(arguments)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


def leave_torchrun() -> None:
    """Remove torchrun's variables, as if a user had started this process by hand."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
    ):
        os.environ.pop(name, None)


def instantiate(folder: str, *arguments: str) -> Any:
    """``MegatronCLI`` of ``arguments`` with its Trainer, module and data; runs nothing."""
    from lightning_megatron.cli.train import MegatronCLI

    leave_torchrun()
    os.chdir(folder)
    return MegatronCLI(args=[*arguments, "--trainer.accelerator", "cpu"], run=False)


def _send_logs_to(stream: io.StringIO) -> None:
    """Redirect Lightning's log handlers, which hold the stderr of import time."""
    import logging

    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(stream)
