"""Does the token that completes a text end a row, wherever in tokens the text begins and ends?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.data.corpus.stop_strings import stop_strings
from lightning_megatron.errors import ConfigError
from tests.generate.readable import byte_level_tokenizer


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("ab é€\n") for _ in range(rng.randint(1, 4)))


def test_a_text_ends_with_the_token_that_completes_it() -> None:
    rng = random.Random(3)
    # Bytes: characters of several lie within tokens, and across them.
    pieces = [_word(rng).encode()[rng.randint(0, 1) :] or b"a" for _ in range(60)] + [b"\xc3", b"\xa9", b"\xe2\x82"]
    pieces = list(dict.fromkeys(pieces))
    tokenizer = byte_level_tokenizer(dict(enumerate(pieces)))
    seen = set()
    for _ in range(20):
        strings = [_word(rng) for _ in range(rng.randint(1, 3))]
        stops = stop_strings(strings, tokenizer)
        rows = torch.tensor([[rng.randrange(len(pieces)) for _ in range(6)] for _ in range(40)])
        expected = []
        for row in rows.tolist():
            said = [pieces[token] for token in row]
            text, before = b"".join(said), len(b"".join(said[:-1]))
            # Ended by the last token: some place of the text ends behind all the tokens before.
            expected.append(any(text.find(s.encode(), max(0, before - len(s.encode()) + 1)) >= 0 for s in strings))
        assert stops.at(rows).tolist() == expected, strings
        seen.update(expected)
        assert stops.at(torch.full((1, 3), stops.no_token)).tolist() == [False]
    assert seen == {True, False}


@pytest.mark.parametrize("tokenizer", [3, "no/such/folder"])
def test_what_is_no_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no/such/folder|tokenizer=3 is a int, and stop_strings need"):
        stop_strings(["a"], tokenizer)


def test_a_tokenizer_may_be_a_folder_and_must_know_the_letters(tmp_path: Path) -> None:
    byte_level_tokenizer({0: b"a", 1: b"b"}).save_pretrained(tmp_path)
    stops = stop_strings(["ab"], tmp_path)
    assert stops.at(torch.tensor([[0, 1], [1, 0]])).tolist() == [True, False]
    assert stop_strings(["ab"], tmp_path) is stops
    assert stop_strings(["ba"], tmp_path).at(torch.tensor([[0, 1], [1, 0]])).tolist() == [False, True]
    with pytest.raises(ConfigError, match=r"stop_strings=\['x'\] can be written with no token"):
        stop_strings(["x"], str(tmp_path))
