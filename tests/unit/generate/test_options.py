"""Are options that cannot be meant refused before anything runs?"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions, options_from


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens=2\.0 must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an integer"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is more than max_new_tokens=8"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, r"top_k=2\.5 must be an integer"),
        ({"top_p": 1.01}, r"top_p=1\.01 is no number from 0 to 1"),
        ({"top_p": -0.1}, r"top_p=-0\.1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_p": "high"}, "wrong type"),
        ({"top_p": 0.9, "top_p_decay": 2.0}, r"top_p_decay=2\.0"),
        ({"top_p_decay": 0.5}, r"top_p_decay=0\.5 has no top_p"),
        ({"top_p": 0.5, "top_p_bound": 0.1}, r"top_p_bound=0\.1 bounds no decay"),
        ({"top_p": 0.5, "top_p_decay": 0.5, "top_p_bound": 0.6}, r"top_p_bound=0\.6 is above top_p=0\.5"),
        ({"top_k": 5, "top_p": 0.5}, r"top_k=5 and top_p=0\.5 both"),
        ({"temperature": 0.0}, r"temperature=0\.0 must be above 0"),
        ({"temperature": 101.0}, r"temperature=101\.0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0 must be above 0"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample=False takes the likeliest"),
        ({"do_sample": False, "top_k": 5}, "do_sample=False"),
        ({"stop_sequences": ((),)}, "stop_sequences has an empty sequence"),
        ({"num_beams": 0}, "num_beams=0 must be an integer of at least 1"),
        ({"num_beams": 3, "top_k": 5}, "num_beams=3 searches for the likeliest text"),
        ({"num_beams": 3, "do_sample": True}, "num_beams=3 searches"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3 is more than num_beams=2"),
        ({"num_return_sequences": 3}, "num_return_sequences=3 would all be the same"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping='soon'"),
        ({"length_penalty": 2.0}, "length_penalty and early_stopping are for beams"),
        ({"early_stopping": True}, "length_penalty and early_stopping are for beams"),
        ({"max_length": 20}, "no option 'max_length'; choose from max_new_tokens, "),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options_from(arguments)


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        ({}, False),
        ({"temperature": 0.5}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0.5}, True),
        ({"do_sample": True}, True),
    ],
)
def test_tokens_are_drawn_when_something_says_how(arguments: dict[str, Any], samples: bool) -> None:
    assert GenerationOptions(**arguments).samples is samples


def test_ended_rows_are_filled_with_the_padding_token_or_the_one_that_ends() -> None:
    assert GenerationOptions(eos_token_id=5).filling == 5
    assert GenerationOptions(eos_token_id=(5, 6), pad_token_id=0).filling == 0
    assert GenerationOptions(eos_token_id=()).filling == 0
