"""The command ``lightning-megatron``: sub-commands, parsers built from signatures and docstrings, and exit codes.

Heavy libraries other than NumPy are imported when a command runs, so that help and argument errors are fast.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from docstring_parser import DocstringStyle, parse, parse_from_object

from lightning_megatron import __version__, errors
from lightning_megatron.cli import data_commands
from lightning_megatron.cli.config import config
from lightning_megatron.cli.generate import generate
from lightning_megatron.cli.inspect import inspect_path
from lightning_megatron.cli.plan import plan
from lightning_megatron.foreign_names import PROG, advice
from lightning_megatron.run.restarts import supervise

TRAINER_COMMANDS = {
    "fit": "train, with validation, checkpoints and loggers",
    "validate": "evaluate on the validation split",
    "test": "evaluate on the test split",
    "predict": "run the model over the prediction data",
}
"""Commands run by LightningCLI, with their help."""
_COMMANDS: dict[str, Callable[..., None]] = {
    "train-tokenizer": data_commands.train_tokenizer,
    "preprocess": data_commands.preprocess,
    "convert-dataset": data_commands.convert_dataset,
    "merge": data_commands.merge,
    "inspect": inspect_path,
    "convert": data_commands.convert,
    "average": data_commands.average,
    "generate": generate,
    "config": config,
    "plan": plan,
    "doctor": data_commands.doctor,
}


class _OneLineErrorParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting.

        Raises:
            ConfigError: Always.
        """
        raise errors.ConfigError(f"{message}; see {self.prog} --help")


def program() -> NoReturn:
    """Run the command line of this process, and exit."""
    code = main()
    if code == errors.INTERRUPTED:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # a second Ctrl-C would interrupt the exit with a traceback
    # Not imported here: torch takes seconds, and after an import interrupted by Ctrl-C a second one fails.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if code != errors.DONE and is_initialized is not None and is_initialized():
        # gloo's threads may still wait for ranks that have exited; the interpreter's shutdown could abort (code 134).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit code: 0 done, 2 wrong arguments or settings, 130 interrupted by Ctrl-C, 141 broken pipe, 143 stopped by
        SIGTERM. All other errors keep their traceback (code 1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command: argparse.ArgumentParser | None = None
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
        message = errors.user_error(error)
        if message is None:
            raise
        return errors.report(
            message if command is None else errors.with_cli_flags(message, command)
        )


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Parse the arguments of a command that is not run by LightningCLI; return them and the command's parser."""
    parser, commands = _parser()
    if arguments and arguments[0] in commands:
        # Before argparse, which reports required options first: they may be there under the names of another tool.
        _refuse_unknown_flags(arguments[0], arguments[1:], commands[arguments[0]])
    parsed, unknown = parser.parse_known_args(arguments)
    command = commands[arguments[0]]
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # for terminals that are not UTF-8
    return parsed, command


def _refuse_unknown_flags(
    name: str, arguments: Sequence[str], command: argparse.ArgumentParser
) -> None:
    """Refuse options that the command does not have, with those to use instead.

    Raises:
        ConfigError: If there are any.
    """
    flags = {
        action.dest: action.option_strings[-1]
        for action in command._actions
        if action.option_strings
    }
    known = [flag for action in command._actions for flag in action.option_strings]
    unknown: dict[str, list[str]] = {}
    words = None
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        flag = word.partition("=")[0]
        if flag.startswith("--"):
            is_known = any(
                each.startswith(flag) for each in known
            )  # argparse accepts abbreviations
            words = None if is_known else unknown.setdefault(flag, [])
        if words is not None:
            words.append(word)
    if not unknown:
        return
    # --help lists the options to choose from.
    hints = {flag: advice(flag, flags, tool=name).partition("choose from")[0] for flag in unknown}
    if len(unknown) == 1:
        ((flag, words),) = unknown.items()
        explained = [" ".join(words), *filter(None, [hints[flag]])]
    else:  # one line for all, without reasons
        short = {
            flag: re.split("[,:?]", hint.removeprefix("did you mean "))[0]
            for flag, hint in hints.items()
        }
        explained = [f"{flag}: {hint or 'unknown'}" for flag, hint in short.items()]
    command.error(f"unrecognized arguments: {'; '.join(explained)}")


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Build the parser of the program, and those of its commands by name."""
    parser = _OneLineErrorParser(
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
        _add_command(commands, name, function)
    return parser, commands.choices


def _add_command(
    commands: argparse._SubParsersAction[_OneLineErrorParser],
    name: str,
    function: Callable[..., None],
) -> None:
    """Add a command whose options are the parameters of ``function``, or the fields of its dataclass parameters.

    Help is taken from docstrings: summary, description and examples of the function, and its ``Args:`` or the docstring
    below each field. Parameters that can be positional become positional arguments. A field's metadata ``flag``
    overrides the name of its option; "" leaves the field out.
    """
    doc = parse(function.__doc__ or "", DocstringStyle.GOOGLE)
    summary = (doc.short_description or "").rstrip(".")
    examples = "\n".join(dedent(example.description or "") for example in doc.examples)
    parser = commands.add_parser(
        name,
        help=summary[:1].lower() + summary[1:],
        description="\n\n".join(filter(None, (doc.short_description, doc.long_description))),
        epilog=f"examples:\n{indent(examples, '  ')}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints: dict[str, Any] = get_type_hints(function)
    option_types: dict[str, Any] = {
        key: hint for key, hint in hints.items() if dataclasses.is_dataclass(hint)
    }
    options: dict[Any, list[str]] = {}
    owners: Any = option_types.values() or (function,)
    for owner in owners:
        help_of = {
            arg.arg_name: arg.description
            for arg in parse_from_object(owner, DocstringStyle.GOOGLE).params
        }
        flags = {
            key: field.metadata.get("flag")
            for key, field in getattr(owner, "__dataclass_fields__", {}).items()
        }
        hints = get_type_hints(owner)
        parameters = inspect.signature(owner).parameters
        options[owner] = [name for name in parameters if flags.get(name) != ""]
        for name in options[owner]:
            _add_argument(
                parser, parameters[name], flags.get(name), hints[name], help_of.get(name) or ""
            )

    def run(parsed: argparse.Namespace) -> None:
        values = {
            owner: {name: getattr(parsed, name) for name in names}
            for owner, names in options.items()
        }
        function(
            **({key: cls(**values[cls]) for key, cls in option_types.items()} or values[function])
        )

    parser.set_defaults(run=run)


def _add_argument(
    parser: argparse.ArgumentParser,
    parameter: inspect.Parameter,
    flag: str | None,
    hint: Any,
    text: str,
) -> None:
    types, default = _leaf_types(hint), parameter.default
    text = " ".join(text.split()).replace("``", "").replace("%", "%%").rstrip(".")
    is_name = text[1:2].isupper() or text.startswith("Hugging Face")
    details: dict[str, Any] = {"help": text if is_name else text[:1].lower() + text[1:]}
    is_positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    names = [parameter.name] if is_positional else [flag or f"--{parameter.name.replace('_', '-')}"]
    if not is_positional:
        details |= {"dest": parameter.name, "required": default is parameter.empty}
    if types == {bool}:
        action = "store_true" if hint is bool else argparse.BooleanOptionalAction
        parser.add_argument(*names, action=action, **details)
        return
    if choices := [
        value for kind in types if get_origin(kind) is Literal for value in get_args(kind)
    ]:
        details["choices"] = choices
    else:
        kind: type = next((kind for kind in (int, float, Path) if types == {kind}), str)
        convert: Callable[[str], Any] = _integer if kind is int else kind
        # Shells do not expand the ~ of --option=~/directory.
        details["type"] = (
            (lambda text: kind(os.path.expanduser(text))) if Path in types else convert
        )
        metavars = {
            int: "N",
            float: "X",
            Path: "PATH",
            str: parameter.name.rpartition("_")[2].rstrip("s").upper(),
        }
        details["metavar"] = "PATH" if Path in types else metavars[kind]
    if any(get_origin(part) in (Sequence, tuple) for part in (hint, *get_args(hint))):
        details["nargs"] = "+"
    if default is not parameter.empty:
        details["default"] = list(default) if isinstance(default, tuple) else default
        if default not in (None, ()):
            details["help"] += (
                f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
            )
    parser.add_argument(*names, **details)


def _integer(text: str) -> int:
    """An integer of 64 bits; larger ones overflow in torch, NumPy and file formats."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if not -(2**63) <= number <= errors.LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected an integer of at most 64 bits, got {text}")
    return number


def _leaf_types(hint: Any) -> set[Any]:
    """Types of a value, or of its items, without None."""
    arguments = () if get_origin(hint) is Literal else get_args(hint)
    return (
        {kind for part in arguments for kind in _leaf_types(part)}
        if arguments
        else {hint} - {type(None), Ellipsis}
    )


def _run_trainer_command(command: str, options: list[str]) -> None:
    """Run a command of LightningCLI, or print its help.

    Lightning's own help lists some hundred options and takes many seconds, because it imports every class that it
    describes. ``trainer_help.txt`` has the most used ones, and says which options show the others.
    """
    if any(option in ("-h", "--help") for option in options):
        text = Path(__file__).with_name("trainer_help.txt").read_text(encoding="utf-8")
        print(
            text.format(prog=PROG, command=command, summary=TRAINER_COMMANDS[command].capitalize())
        )
        return
    if command == "fit":
        options = _supervise(options)
    # As with `python -m`: a configuration may name classes in the user's own modules.
    sys.path.insert(0, os.getcwd())
    from lightning_megatron.cli.train import run, show_all_options

    if "--help-all" in options:
        show_all_options(command)
    else:
        run([command, *options])


def _supervise(options: list[str]) -> list[str]:
    """With ``--max-restarts``, supervise a child process and exit with its code; otherwise return the other options.

    Raises:
        ConfigError: If the value is negative, or a launcher that does restarts itself has started this process.
    """
    parser = _OneLineErrorParser(prog=f"{PROG} fit", add_help=False, allow_abbrev=False)
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    parsed, others = parser.parse_known_args(options)
    if parsed.max_restarts == 0:
        return others
    if parsed.max_restarts < 0:
        raise errors.ConfigError(
            f"--max-restarts: expected at least 0, got {parsed.max_restarts}; give 0 or more"
        )
    if launcher := next(
        (name for name in ("RANK", "LOCAL_RANK", "SLURM_NTASKS") if name in os.environ), None
    ):
        raise errors.ConfigError(
            f"--max-restarts: expected no other launcher, got {launcher} in the environment; use its restarts"
        )
    sys.exit(
        supervise([sys.executable, "-m", "lightning_megatron", "fit", *others], parsed.max_restarts)
    )
