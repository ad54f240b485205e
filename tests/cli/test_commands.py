"""Fast help, exit codes, error messages, and which rank reports an error."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_megatron import errors
from lightning_megatron.cli import main, program
from lightning_megatron.cli.commands import build_parser
from lightning_megatron.errors import ConfigError
from tests.ranks import ROOT, RankError, run_ranks

COMMANDS = tuple(build_parser()[1])
_ALL_HELP = """
import sys, time
from lightning_megatron.cli import main
for words in ([], *([name] for name in sys.argv[1:])):
    try:
        code = main([*words, "--help"])
    except SystemExit as error:
        code = error.code
    assert not code
print(time.process_time(), [name for name in ("torch", "transformers", "lightning") if name in sys.modules])
"""


def test_help_of_every_command_is_fast_and_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALL_HELP, *COMMANDS], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    *text, last = done.stdout.splitlines()
    seconds, heavy = last.split(" ", 1)
    assert float(seconds) < 3
    assert heavy == "[]"
    usages = [line for line in text if line.startswith("usage: lightning-megatron")]
    assert len(usages) == len(COMMANDS) + 1
    for option in (
        "--ckpt_path",
        "--print_config",
        "--help-all",
        "--max-shard-size SIZE",
        "(mmap, cached, lazy)",
    ):
        assert any(option in line for line in text), option


def test_every_option_of_every_command_may_have_underscores() -> None:
    for command in build_parser()[1].values():
        for action in command.options:
            for flag in action.option_strings:
                underscored = flag[:2] + flag[2:].replace("-", "_")
                assert command.with_hyphens([underscored]) == [flag]
                typed = [f"{underscored}=a_b", "c_d", "--", underscored]
                assert command.with_hyphens(typed) == [f"{flag}=a_b", *typed[1:]]


def test_options_of_other_tools_keep_their_underscores() -> None:
    command = build_parser()[1]["generate"]
    assert command.with_hyphens(["--tokens_to_generate", "3"]) == ["--tokens_to_generate", "3"]


# ---- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_trainer", [False, True])
def test_interrupt_prints_one_line_and_exits_with_130(
    in_trainer: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> str:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if in_trainer:
                sys.exit(1)  # lightning 2.6, pytorch/trainer/call.py
            raise

    monkeypatch.setattr("lightning_megatron.cli.doctor.report_installation", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_closed_output_pipe_ends_the_command_silently(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report() -> str:
        if not pipes:
            raise BrokenPipeError  # of another pipe than stdout: a bug
        os.close(pipes.pop())
        return "to nowhere"

    monkeypatch.setattr("lightning_megatron.cli.doctor.report_installation", report)
    reading, writing = os.pipe()
    pipes = [reading]
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["doctor"]) == 141
        with pytest.raises(BrokenPipeError):
            main(["doctor"])
    assert capsys.readouterr().err == ""


def _fail_while_connected() -> None:
    import atexit
    from unittest.mock import patch

    import torch.distributed as dist

    dist.init_process_group("gloo")
    atexit.register(print, "atexit handlers ran")
    with patch("lightning_megatron.cli.commands.main", lambda: 2):
        program()


def test_failed_rank_exits_without_interpreter_shutdown() -> None:
    # There is no result either, because os._exit skips sending one.
    with pytest.raises(RankError, match="died without a result") as caught:
        run_ranks(_fail_while_connected, 2)
    assert "atexit handlers ran" not in str(caught.value)


# ---- error messages -------------------------------------------------------------------------------------------------


def test_user_error_follows_causes_but_not_contexts() -> None:
    caused = ValueError("not valid")
    unrelated = RuntimeError("bug")
    caused.__cause__ = unrelated.__context__ = ConfigError("lr=-1\n must be positive")
    assert errors.user_error(caused) == "lr=-1 must be positive"
    assert errors.user_error(unrelated) is None
    with pytest.raises(RuntimeError) as misspelled:
        EarlyStopping("val_los")._validate_condition_metric({})
    assert "conditioned on metric `val_los` which is not available" in (
        errors.user_error(misspelled.value) or ""
    )


def test_messages_name_options_as_typed_except_inside_paths() -> None:
    message = "top_k=3 is more than top_k allows, set do_sample=True; runs/tp=2/top_k.json and my-tp=2 and stop_top_k"
    typed = "--top-k 3 is more than --top-k allows, set --sample; runs/tp=2/top_k.json and my-tp=2 and stop_top_k"
    assert build_parser()[1]["generate"].with_flags(message) == typed


def test_only_one_rank_reports_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_REPORT_DELAY_SECONDS", 0.2)
    # Rank 2 reports because no other rank ends the job.
    for rank, message in (("0", "tp=3 is wrong"), ("2", "local rank 2: tp=3 is wrong")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert errors.report("tp=3 is wrong") == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    child = (
        "import os; os.environ['LOCAL_RANK'] = '1'; from lightning_megatron.errors import report; "
        "print(flush=True); report('x')"
    )
    # The parent exits a second after the child says that it is about to report.
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "time.sleep(1)\n"
    )
    # Both processes hold stderr, so run() returns only after the child has ended.
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.stderr == ""


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_shows_versions_slots_and_optional_packages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from lightning_megatron.engine.ops.report import ops_report

    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    ops = ops_report("cuda" if torch.cuda.is_available() else "cpu")
    rows = [
        f"{'torch'.ljust(18)}  {version('torch')}",
        "\nflash-attn-4 ",
        "MegatronStrategy(offload_optimizer=True) keeps AdamW's state of ",
        *(
            f"pip install 'lightning-megatron[{extra}]'"
            for extra in ("data", "eval", "flash", "remote")
        ),
    ]
    assert [each for each in (*rows, *(reason for *_, reason in ops)) if each not in text] == []
