"""What does ``generate`` take?

Only the standard library is imported before the command runs, as in ``commands.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_megatron.cli.errors import DONE

_DESCRIPTION = """\
Continue prompts with the model of a checkpoint, on one process or on tp x pp of them.

Read is what convert reads: Hugging Face model directories, *.ckpt of MegatronStrategy, Megatron-Core's distributed
checkpoints and Megatron-LM's, or models of the Hugging Face hub by name (org/name); each process reads its own part.
Greedy unless an option says how to draw.
GPTs continue the prompts; the encoder of a T5 reads them, and the text is its decoder's."""
_EPILOG = """\
examples:
  {prog} --checkpoint gpt2 --prompt "Are you human?" --max-new-tokens 40
  {prog} --checkpoint last.ckpt --tokenizer gpt2 --tp 2 --prompt "Once" "Twice" --top-p 0.8 --top-p-decay 0.9
  {prog} --checkpoint gpt2 --prompt "Are you human?" --num-beams 20 --length-penalty 1.5
  {prog} --checkpoint gpt2 --prompt-file prompts.txt --json > texts.jsonl"""


def add_generate_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of this file to those of the program."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with the model of any checkpoint",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.usage = f"{parser.prog} --checkpoint PATH (--prompt TEXT ... | --prompt-file FILE) [options]"
    parser.epilog = _EPILOG.format(prog=parser.prog)
    # An option's name in Python (dest) is that of what it sets, so that messages can be told in the words typed here.
    parser.add_argument(
        "--checkpoint",
        dest="load_path",
        type=Path,
        required=True,
        metavar="PATH",
        help="what to read, or org/name",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", metavar="TEXT", help="texts to continue")
    prompts.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="text file with a prompt on each line; - for standard input"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="transformers tokenizer (default: that of the checkpoint)"
    )
    _add_source(parser)
    _add_computation(parser.add_argument_group("computation"))
    _add_output(parser.add_argument_group("output"))
    _add_ends(parser.add_argument_group("length"))
    _add_drawing(parser.add_argument_group("drawing"))
    _add_beams(parser.add_argument_group("beams"))
    parser.set_defaults(run=_generate)


def _add_source(parser: Any) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a Hugging Face config.json for checkpoints that do not say what their model is",
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="which of a folder of iterations (default: the last one saved)"
    )


def _add_computation(group: Any) -> None:
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)")
    group.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    group.add_argument(
        "--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="where to compute (default: auto)"
    )
    group.add_argument(
        "--precision",
        choices=("32-true", "bf16-true", "bf16-mixed", "16-mixed"),
        help="32-true computes in float32, the others in 16 bits (default: as the weights on GPUs, else 32-true)",
    )
    group.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="prompts that are continued together (default: 32)"
    )
    group.add_argument(
        "--static-cache",
        action=argparse.BooleanOptionalAction,
        help="steps of one shape, which a GPU replays as a CUDA graph; GPTs only (default: on GPUs)",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--json", action="store_true", help='a line {"prompt": ..., "text": ...} for each text')
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="show a text while it grows (default: a single one on a terminal)",
    )


def _add_ends(group: Any) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="at most so many (default: 20)")
    group.add_argument("--min-new-tokens", type=int, default=0, metavar="N", help="no end before (default: 0)")
    group.add_argument(
        "--stop", dest="stop_strings", nargs="+", default=[], metavar="TEXT", help="texts behind which a text ends"
    )
    group.add_argument("--add-bos", action="store_true", help="put the tokenizer's first token before each prompt")


def _add_drawing(group: Any) -> None:
    group.add_argument(
        "--sample",
        dest="do_sample",
        action="store_true",
        default=None,
        help="draw tokens at random; temperature, top-k, top-p and min-p do so, too",
    )
    group.add_argument("--temperature", type=float, default=1.0, metavar="X", help="divides logits; in (0, 100]")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest tokens")
    group.add_argument(
        "--top-p", type=float, default=0.0, metavar="X", help="draw from the likeliest tokens with this probability"
    )
    group.add_argument("--top-p-decay", type=float, default=0.0, metavar="X", help="multiplies top-p after each token")
    group.add_argument("--top-p-bound", type=float, default=0.0, metavar="X", help="top-p decays no further")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="X", help="draw from tokens X times as likely as the likeliest one"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 repetition is rarer (default: 1)"
    )
    group.add_argument(
        "--no-repeat-ngram-size", type=int, default=0, metavar="N", help="no run of N tokens comes twice"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws another text (default: 0)")


def _add_beams(group: Any) -> None:
    group.add_argument("--num-beams", type=int, default=1, metavar="N", help="search with N beams (default: 1, none)")
    group.add_argument(
        "--length-penalty", type=float, default=1.0, metavar="X", help="above 0 favours longer texts (default: 1)"
    )
    group.add_argument(
        "--early-stopping",
        choices=("true", "false", "never"),
        default="false",
        help="end when enough texts are complete, when no better one is likely, or none possible (default: false)",
    )
    group.add_argument(
        "--num-return-sequences", type=int, default=1, metavar="N", help="texts of each prompt (default: 1)"
    )


def _generate(parsed: argparse.Namespace) -> int:
    from lightning_megatron.cli.generation import arguments_from, generate

    generate(arguments_from({name: value for name, value in vars(parsed).items() if name != "run"}))
    return DONE
