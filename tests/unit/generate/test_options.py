"""Options that cannot be meant are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions, options_from


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_new_tokens": True}, "max_new_tokens=True must be an integer, and is a bool"),
        ({"max_length": 1}, "max_length=1 must be a number at least 2"),
        ({"seed": 2**64}, "must be a number from"),
        ({"top_p": float("nan")}, "top_p=nan must be a number from 0 to 1"),
        ({"top_p": "high"}, "top_p='high' must be a number"),
        ({"temperature": 0.0}, r"temperature=0\.0 must be a number from 1e-30 to 100"),
        ({"do_sample": "yes"}, "do_sample='yes' must be True or False"),
        ({"early_stopping": "soon", "num_beams": 2}, "early_stopping='soon'"),
        ({"max_length": 20, "max_new_tokens": 20}, "max_new_tokens=20 and max_length=20 both say"),
        ({"min_length": 20, "min_new_tokens": 2}, "min_new_tokens=2 and min_length=20 both say"),
        ({"stop_strings": ("x", "")}, "must be a text or a tuple of texts, not empty"),
        ({"stop_strings": 3}, "stop_strings=3 must be a text"),
        ({"stop_sequences": ("ab",)}, "stop_sequences=.*: expected integers, and tuples of them"),
        ({"eos_token_id": "2"}, "eos_token_id='2', .*: expected integers"),
        ({"top_p_decay": 0.5}, r"top_p_decay=0\.5 has no top_p"),
        ({"top_p": 0.5, "top_p_bound": 0.1}, r"top_p_bound=0\.1 bounds no decay"),
        ({"top_p": 0.5, "top_p_decay": 0.5, "top_p_bound": 0.6}, r"top_p_bound=0\.6 is above top_p=0\.5"),
        ({"do_sample": False, "top_k": 5, "min_p": 0.1}, "takes the likeliest token, and top_k=5 and min_p=0.1 says"),
        ({"num_beams": 3, "top_k": 5}, "num_beams=3 searches for the likeliest text, and top_k=5 draws"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3 is more than num_beams=2"),
        ({"num_return_sequences": 3}, "num_return_sequences=3 would all be the same"),
        ({"length_penalty": 2.0}, r"length_penalty=2\.0 is for beams"),
        ({"typical_p": 0.5}, "no option 'typical_p'; choose from max_new_tokens, "),
        ({"add_BOS": True}, "no option 'add_BOS'; here it is bos_token_id"),
        ({"output_scores": True}, "here it is MegatronModule.generate_with_scores"),
        ({"use_cache": True}, "leave it out: keys and values are always kept"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options_from(arguments)


def test_what_changes_nothing_contradicts_nothing() -> None:
    assert not options_from({"do_sample": False, "temperature": None, "top_k": None, "top_p": None}).samples
    assert not options_from({"do_sample": False, "temperature": 1.0, "top_p": 1.0, "num_beams": 3}).samples
    # As in transformers: the likeliest tokens of the likeliest.
    assert options_from({"top_k": 50, "top_p": 0.9}).samples
    assert options_from({"top_k": 50, "top_p": 1.0, "length_penalty": None, "max_new_tokens": None}).top_k == 50


@pytest.mark.parametrize(
    ("arguments", "room", "lengths"),
    [
        ({}, None, (0, 20)),
        ({}, 5, (0, 5)),
        ({"max_new_tokens": 30}, 5, (0, 30)),
        ({"max_length": 14}, 5, (0, 4)),
        ({"max_length": 14, "min_length": 12}, None, (2, 4)),
        ({"min_length": 8}, None, (0, 20)),
        ({"min_new_tokens": 3}, None, (3, 20)),
    ],
)
def test_lengths_are_counted_behind_the_prompts(arguments: dict[str, Any], room: int | None, lengths: Any) -> None:
    settled = GenerationOptions(**arguments).settled(10, room)
    assert (settled.min_new_tokens, settled.num_new_tokens) == lengths
    assert settled.settled(10) == settled


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"max_length": 10},
            "max_length=10 leaves rows of 10 .* at least 1 and at most 0 new tokens; give a larger max_l",
        ),
        ({"min_new_tokens": 21}, "min_new_tokens=21 leaves .* at least 21 and at most 20 new .* give a larger max_new"),
        ({"min_length": 31, "max_new_tokens": 20}, "min_length=31 and max_new_tokens=20 leaves"),
    ],
)
def test_lengths_that_the_prompts_do_not_leave_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GenerationOptions(**arguments).settled(10)
