"""Which sub-commands are there, and what does each take?

Only the standard library is imported before a command runs, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from lightning_megatron import __version__
from lightning_megatron.cli.config_command import add_config_command, refuse_accelerates
from lightning_megatron.cli.conversion_command import add_convert_command
from lightning_megatron.cli.corpus_commands import add_corpus_commands
from lightning_megatron.cli.dataset_commands import add_dataset_commands
from lightning_megatron.cli.failure import (
    DONE,
    TERMINATED,
    UNREAD,
    UsageError,
    is_unread,
    report,
    report_interrupt,
    users_mistake,
)
from lightning_megatron.cli.generate_command import add_generate_command
from lightning_megatron.cli.help_text import TRAINER_COMMANDS, trainer_help
from lightning_megatron.cli.typed import expand_home, in_typed_words
from lightning_megatron.foreign_names import advice

PROG = "lightning-megatron"


class _OneLineErrorParser(argparse.ArgumentParser):
    """argparse without the usage dump: wrong arguments are one line like every other mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit code: 0 done, 2 wrong arguments or settings, 130 ended by Ctrl-C, 141 nobody reads the output any more,
        143 stopped by SIGTERM. Anything else that fails keeps its traceback (code 1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        is_trainers = bool(arguments) and arguments[0] in TRAINER_COMMANDS
        code = _run_trainer_command(arguments) if is_trainers else _run_command(arguments)
        sys.stdout.flush()  # here, where it is known what to do if it fails
        return code
    except KeyboardInterrupt:
        return report_interrupt()
    except BrokenPipeError:
        if not is_unread(sys.stdout):
            raise
        return UNREAD
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # a Trainer ends so, with code 1
            return report_interrupt()
        if ended.code != TERMINATED:
            raise
        return TERMINATED
    except Exception as error:
        message = users_mistake(error)
        if message is None:
            raise
        return report(message)


def _run_command(arguments: list[str]) -> int:
    """Run a command whose options argparse reads; the user's mistakes are told in the words that were typed."""
    parser, commands = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    command = commands[arguments[0]]
    if unknown:
        flags = {action.dest: action.option_strings[-1] for action in command._actions if action.option_strings}
        hint = advice(unknown[0].partition("=")[0], flags).partition("choose from")[0]  # --help shows what there is
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'; {hint}'}")
    expand_home(command, parsed)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except Exception as error:
        message = users_mistake(error)
        if message is None:
            raise
        return report(in_typed_words(message, command))


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The program's parser, and those of its commands by their names."""
    parser = _OneLineErrorParser(
        prog=PROG,
        description="Train language models with tensor, pipeline and sequence parallelism on PyTorch Lightning.",
        epilog=f"{PROG} COMMAND --help describes a command. Exit codes: 0 done, 1 failed, 2 wrong arguments,"
        " 130 ended by Ctrl-C, 143 stopped by SIGTERM.",
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    # The parsers of the sub-commands are of the same class, so they report errors in the same way.
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in TRAINER_COMMANDS.items():
        commands.add_parser(name, help=summary)  # for the list in --help; main() runs them
    add_corpus_commands(commands)
    add_dataset_commands(commands)
    add_convert_command(commands)
    add_generate_command(commands)
    add_config_command(commands)
    _add_doctor(commands)
    return parser, commands.choices


def _add_doctor(commands: argparse._SubParsersAction[_OneLineErrorParser]) -> None:
    summary = "show versions, devices, and what fills each slot of the engine"
    parser = commands.add_parser("doctor", help=summary, description=summary)
    parser.set_defaults(run=_doctor)


def _run_trainer_command(arguments: list[str]) -> int:
    command, options = arguments[0], arguments[1:]
    if any(option in ("-h", "--help") for option in options):
        print(trainer_help(PROG, command))
        return DONE
    refuse_accelerates(options)
    # As with `python -m`: a configuration may name classes in the user's own files.
    sys.path.insert(0, os.getcwd())
    from lightning_megatron.cli.training import run, show_all_options

    if "--help-all" in options:
        show_all_options(command)
    else:
        run([command, *options])
    return DONE


def _doctor(parsed: argparse.Namespace) -> int:
    from lightning_megatron.cli.doctor import report_installation

    print(report_installation())
    return DONE
