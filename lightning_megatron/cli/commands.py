"""The command ``lightning-megatron``: its sub-commands, and exit codes.

Heavy libraries other than NumPy are imported when a command runs, so that help and argument errors are fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_megatron import __version__, errors
from lightning_megatron.cli.config import config
from lightning_megatron.cli.convert import average, convert
from lightning_megatron.cli.datasets import convert_dataset, merge, preprocess, train_tokenizer
from lightning_megatron.cli.doctor import doctor
from lightning_megatron.cli.evaluate import evaluate
from lightning_megatron.cli.generate import generate
from lightning_megatron.cli.inspect import inspect_path
from lightning_megatron.cli.parser import CommandParser, add_command
from lightning_megatron.cli.plan import plan
from lightning_megatron.cli.verify import verify
from lightning_megatron.foreign_names import PROG
from lightning_megatron.run.restarts import supervise

TRAINER_COMMANDS = {
    "fit": "train, with validation, checkpoints and loggers",
    "validate": "evaluate on the validation split",
    "test": "evaluate on the test split",
    "predict": "run the model over the prediction data",
}
"""Commands run by LightningCLI, with their help."""
_COMMANDS: dict[str, Callable[..., None]] = {
    "train-tokenizer": train_tokenizer,
    "preprocess": preprocess,
    "convert-dataset": convert_dataset,
    "merge": merge,
    "inspect": inspect_path,
    "convert": convert,
    "average": average,
    "generate": generate,
    "evaluate": evaluate,
    "verify": verify,
    "config": config,
    "plan": plan,
    "doctor": doctor,
}


def program() -> NoReturn:
    """Run the command line of this process, and exit."""
    code = main()
    if code == errors.INTERRUPTED:
        # A second Ctrl-C would interrupt the exit with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code != errors.DONE and _is_connected():
        # gloo's threads may still wait for ranks that have exited; the interpreter's shutdown could abort (code 134).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_connected() -> bool:
    """Whether this process has joined a process group."""
    # Not imported here: torch takes seconds, and after an import interrupted by Ctrl-C a second one fails.
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)
    return is_initialized is not None and is_initialized()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit code: 0 done, 2 wrong arguments or settings, 130 interrupted by Ctrl-C, 141 broken pipe, 143 stopped by
        SIGTERM. All other errors keep their traceback (code 1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command: CommandParser | None = None
    try:
        if arguments and arguments[0] in TRAINER_COMMANDS:
            _run_trainer_command(arguments[0], arguments[1:])
        else:
            parsed, command = _parse(arguments)
            parsed.run(parsed)
        sys.stdout.flush()  # here, where a broken pipe is handled
        return errors.DONE
    except KeyboardInterrupt:
        return errors.report_interrupt()
    except BrokenPipeError:
        if not errors.is_broken_pipe(sys.stdout):
            raise
        return errors.BROKEN_PIPE
    except SystemExit as exit_:
        if isinstance(exit_.__context__, KeyboardInterrupt):  # the Trainer exits with code 1
            return errors.report_interrupt()
        if exit_.code != errors.TERMINATED:
            raise
        return errors.TERMINATED
    except Exception as error:
        if isinstance(error.__cause__, errors.ReportedError):
            return errors.WRONG_ARGUMENTS
        message = errors.user_error(error)
        if message is None:
            raise
        if command is not None:
            message = command.with_flags(message)
        return errors.report(message)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, CommandParser]:
    """Parse the arguments of a command that is not run by LightningCLI; return them and the command's parser."""
    parser, commands = build_parser()
    name, *words = arguments or [""]
    if name in commands:
        words = commands[name].with_hyphens(words)
        # Before argparse, which reports required options first: they may be there under the names of another tool.
        commands[name].refuse_unknown_options(words, name)
        arguments = [name, *words]
    parsed, unknown = parser.parse_known_args(arguments)
    command = commands[name]
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    with contextlib.suppress(AttributeError):
        # For terminals that are not UTF-8.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return parsed, command


def build_parser() -> tuple[CommandParser, Mapping[str, CommandParser]]:
    """Build the parser of the program, and those of its commands by name."""
    parser = CommandParser(
        prog=PROG,
        description="Train language models with tensor, pipeline and sequence parallelism on PyTorch Lightning.",
        epilog=f"{PROG} COMMAND --help describes a command. Exit codes: 0 done, 1 failed, 2 wrong arguments,"
        " 130 interrupted by Ctrl-C, 143 stopped by SIGTERM.",
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    # Parsers of sub-commands have the same class, and so the same error reports.
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in TRAINER_COMMANDS.items():
        commands.add_parser(name, help=summary)  # for --help only; main() runs them
    for name, function in _COMMANDS.items():
        add_command(commands, name, function)
    return parser, commands.choices


def _run_trainer_command(command: str, options: list[str]) -> None:
    """Run a command of LightningCLI, or print its help.

    Lightning's own help lists some hundred options and takes many seconds, because it imports every class that it
    describes. ``trainer_help.txt`` has the most used ones, and says which options show the others.
    """
    if "-h" in options or "--help" in options:
        _print_trainer_help(command)
        return
    if command == "fit":
        options = _supervise(options)
    # As with `python -m`: a configuration may name classes in the user's own modules.
    sys.path.insert(0, os.getcwd())
    from lightning_megatron.cli.train import run, show_all_options

    if "--help-all" in options or "--help_all" in options:
        show_all_options(command)
    else:
        run([command, *options])


def _print_trainer_help(command: str) -> None:
    text = Path(__file__).with_name("trainer_help.txt").read_text(encoding="utf-8")
    summary = TRAINER_COMMANDS[command].capitalize()
    print(text.format(prog=PROG, command=command, summary=summary))


def _supervise(options: list[str]) -> list[str]:
    """With ``--max-restarts``, supervise a child process and exit with its code; otherwise return the other options.

    Raises:
        ConfigError: If the value is negative, or a launcher that does restarts itself has started this process.
    """
    parser = CommandParser(prog=f"{PROG} fit", add_help=False, allow_abbrev=False)
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    parsed, others = parser.parse_known_args(options)
    if parsed.max_restarts == 0:
        return others
    if parsed.max_restarts < 0:
        raise errors.ConfigError(
            f"--max-restarts: expected at least 0, got {parsed.max_restarts}; give 0 or more"
        )
    for name in ("RANK", "LOCAL_RANK", "SLURM_NTASKS"):
        if name in os.environ:
            raise errors.ConfigError(
                f"--max-restarts: expected no other launcher, got {name} in the environment; use its restarts"
            )
    child = [sys.executable, "-m", "lightning_megatron", "fit", *others]
    sys.exit(supervise(child, parsed.max_restarts))
