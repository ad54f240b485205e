"""Does a message say what the user typed, and is ``~`` a home wherever a path is meant?"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lightning_megatron.cli.errors import expand_home, in_typed_words


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--checkpoint", dest="load_path", type=Path, metavar="PATH")
    parser.add_argument("--input", nargs="+", metavar="PREFIX")
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("--sample", dest="do_sample", action="store_true")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--tp", type=int)
    return parser


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("top_k=3 is more than top_k allows", "--top-k 3 is more than --top-k allows"),
        ("load_path=/a/b does not exist", "--checkpoint /a/b does not exist"),
        ("set do_sample=True, or do_sample.", "set --sample, or --sample."),
        ("tp=3 does not divide it; choose tp from 1, 2", "--tp 3 does not divide it; choose tp from 1, 2"),
        # Names in paths, names of other things, and parts of longer names stay.
        ("runs/tp=2/top_k.json and my-tp=2 and stop_top_k", "runs/tp=2/top_k.json and my-tp=2 and stop_top_k"),
        ("max_tp=2 and top_k_decay=1", "max_tp=2 and top_k_decay=1"),
        ("path=x and help", "path=x and help"),
    ],
)
def test_options_are_named_as_they_are_typed(parser: argparse.ArgumentParser, message: str, typed: str) -> None:
    assert in_typed_words(message, parser) == typed


def test_only_paths_begin_at_home(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parsed = parser.parse_args(["~/a", "--checkpoint=~", "--input", "~/b", "c/~", "--prompt", "~/d"])
    expand_home(parser, parsed)
    assert parsed.path == "/home/me/a"
    assert parsed.load_path == Path("/home/me")
    assert parsed.input == ["/home/me/b", "c/~"]
    assert parsed.prompt == "~/d"
