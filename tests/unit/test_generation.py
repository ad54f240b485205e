"""Generation options, requests refused before decoding, token sampling, special tokens and stop strings."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.logits_processors import logits_processors
from lightning_megatron.generate.options import GenerationOptions, options_from
from lightning_megatron.generate.request import build_request
from lightning_megatron.generate.sampler import sample_tokens, uniform_numbers
from lightning_megatron.generate.special_tokens import SpecialTokens, special_token_ids
from lightning_megatron.generate.stop_strings import stop_strings
from tests.generate.models import model_of
from tests.tokenizers import byte_level_tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": True}, "max_new_tokens=True must be an integer, and is a bool"),
        ({"top_p": float("nan")}, "top_p=nan must be a finite number"),
        ({"temperature": 0.0}, "temperature=0 must be more than 0; leave it out"),
        ({"stop_strings": ("x", "")}, "expected a non-empty string or a tuple of them"),
        ({"stop_sequences": ("ab",)}, "stop_sequences=.*: expected integers, and tuples of them"),
        ({"top_p_decay": 0.5}, r"top_p_decay=0\.5 has no top_p"),
        (
            {"top_p": 0.5, "top_p_decay": 0.5, "top_p_bound": 0.6},
            r"top_p_bound=0\.6 is above top_p=0\.5",
        ),
        (
            {"do_sample": False, "top_k": 5, "min_p": 0.1},
            "but top_k=5 and min_p=0.1 is for sampling",
        ),
        ({"num_return_sequences": 3}, "num_return_sequences=3 would return the same"),
        ({"length_penalty": 2.0}, r"length_penalty=2\.0 is for beam search"),
        ({"typical_p": 0.5}, "no option 'typical_p'; choose from max_new_tokens, "),
        ({"output_scores": True}, "use MegatronModule.generate_with_scores"),
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_from(arguments)


def test_neutral_options_are_accepted() -> None:
    assert not options_from(
        {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    ).samples
    assert not options_from(
        {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "num_beams": 3}
    ).samples
    # As in transformers, top_p applies to the tokens that top_k keeps.
    assert options_from({"top_k": 50, "top_p": 0.9, "length_penalty": None}).samples


@pytest.mark.parametrize(
    ("arguments", "room", "expected"),
    [
        ({}, None, (0, 20)),
        ({}, 5, (0, 5)),
        ({"max_length": 14, "min_length": 12}, None, (2, 4)),
        (
            {"max_length": 10},
            None,
            "max_length=10 leaves rows of 10 .* at most 0 new tokens; give a larger max_length",
        ),
        (
            {"min_length": 31, "max_new_tokens": 20},
            None,
            "min_length=31 and max_new_tokens=20 leaves",
        ),
    ],
)
def test_length_limits_apply_after_the_prompts(
    arguments: dict[str, Any], room: int | None, expected: Any
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            GenerationOptions(**arguments).new_token_limits(10, 10, room and 9 + room)
    else:
        assert (
            GenerationOptions(**arguments).new_token_limits(10, 10, room and 9 + room) == expected
        )


def _ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("input_ids", "mask", "options", "message"),
    [
        (
            [[1]],
            None,
            {},
            r"input_ids: expected a tensor of integers, \[prompts, tokens\], got a list",
        ),
        (
            _ids([1, 2]),
            [[1, 1]],
            {},
            r"attention_mask: expected the shape \[1, 2\] of input_ids, got a list",
        ),
        (
            _ids([1, 2]),
            _ids([1, 2]),
            {},
            "expected 1 for tokens and 0 for padding",
        ),
        (
            _ids([1], [2]),
            _ids([0], [1]),
            {},
            r"prompts \[0\] are empty",
        ),
        (_ids([1, 83]), None, {}, r"expected tokens of the vocabulary, 0 to 82, got 83"),
        (
            _ids([1] * 32),
            None,
            {"max_new_tokens": 10},
            "a prompt of 32 tokens and max_new_tokens=10 .* at most 9",
        ),
        (
            _ids([1] * 32),
            None,
            {"max_length": 42},
            "a prompt of 32 tokens and max_length=42 .* of at most 41",
        ),
        (_ids([1] * 50), None, {}, "cut the prompts to 40 tokens"),
    ],
)
def test_invalid_prompts_are_refused(
    input_ids: Any,
    mask: Any,
    options: Any,
    message: str,
) -> None:
    inputs = (
        {"input_ids": input_ids}
        if mask is None
        else {"input_ids": input_ids, "attention_mask": mask}
    )
    with pytest.raises(ConfigError, match=message):
        build_request(inputs, options, model_of("gpt2"))


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_top_p_decays_from_the_second_token_to_its_bound() -> None:
    options = {"top_p": 0.8, "top_p_decay": 0.5, "top_p_bound": 0.3}
    (decaying,) = logits_processors(
        build_request({"input_ids": _ids([1])}, options, model_of("gpt2"))
    )
    logits = torch.linspace(0.0, 2.0, 50)[None]
    sequences = torch.zeros(1, 4, dtype=torch.long)
    num_kept = [
        int(torch.isfinite(decaying(sequences[:, : 1 + step], logits)).sum()) for step in range(4)
    ]
    assert num_kept == sorted(num_kept, reverse=True)
    assert num_kept[0] > num_kept[2] == num_kept[3] >= 1


def test_sampled_frequencies_match_probabilities() -> None:
    draws = 20_000
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.15, 0.1, 0.05])
    uniform = uniform_numbers(seed=7, steps=1, rows=draws)[0]
    counts = torch.bincount(
        sample_tokens(probabilities.log().expand(draws, -1), uniform),
        minlength=6,
    ).double()
    assert counts[1] == 0
    expected = draws * probabilities.double()
    possible = expected > 0
    # Four degrees of freedom: 18.47 is exceeded once in a thousand seeds.
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 18.47


# ---- special tokens and stop strings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, SpecialTokens(eos=(1,), pad=0)),
        ('{"eos_token_id": [5, 6], "pad_token_id": 7}', SpecialTokens(eos=(5, 6), pad=7)),
        ('{"decoder_start_token_id": 8, "bos_token_id": 9}', SpecialTokens(start=8)),
        ('{"eos_token_id": 5, "bos_token_id": 9}', SpecialTokens(eos=(5,), start=9)),
        ("{", "cannot be read as JSON"),
    ],
)
def test_generation_config_takes_precedence_over_config(
    tmp_path: Path, generation: str | None, expected: Any
) -> None:
    fields = {"model_type": "t5", "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            special_token_ids(tmp_path)
    else:
        assert special_token_ids(tmp_path) == expected


def test_a_generation_config_that_changes_greedy_tokens_is_announced(tmp_path: Path) -> None:
    """As that of Qwen2.5's chats: transformers divides logits by its penalty also where nothing is sampled."""
    fields = {"repetition_penalty": 1.05, "eos_token_id": 5, "do_sample": True, "num_beams": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match=r"got also repetition_penalty=1\.05, which transformers"):
        assert special_token_ids(tmp_path) == SpecialTokens(eos=(5,))
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.8}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        special_token_ids(tmp_path)


def test_checkpoints_have_the_ends_of_the_generation_config(tmp_path: Path) -> None:
    """``generate`` from a checkpoint would go on where the run that wrote it ends."""
    from lightning_megatron import MegatronModule

    fields = {"model_type": "llama", "num_hidden_layers": 1, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    module = MegatronModule(model=str(tmp_path))
    assert special_token_ids(module.hparams["model"]) == special_token_ids(tmp_path)
    assert module.hugging_face_config is not None
    assert module.hugging_face_config["eos_token_id"] == [1, 5]


def test_stop_strings_need_a_tokenizer_that_can_encode_them(tmp_path: Path) -> None:
    # transformers up to 5.8 finds what a token stands for by "abcdef" before it.
    letters = {number: bytes([97 + number]) for number in range(6)}
    byte_level_tokenizer(letters).save_pretrained(tmp_path)
    assert stop_strings(["ab"], tmp_path, 6)(torch.tensor([[0, 1], [1, 0]]), None).tolist() == [
        True,
        False,
    ]
    with pytest.raises(ConfigError, match=r"stop_strings=\('x',\) cannot be written"):
        stop_strings(["x"], str(tmp_path), 6)
    with pytest.raises(ConfigError, match="stop_strings: expected a tokenizer .* got 3"):
        stop_strings(["a"], 3, 6)


@pytest.mark.parametrize(("max_new_tokens", "count"), [(13, 0), (14, 1)])
def test_rows_beyond_the_trained_rotary_positions_are_reported(
    max_new_tokens: int, count: int
) -> None:
    model = replace(model_of("llama"), max_position_embeddings=16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_request({"input_ids": _ids([1, 2, 3])}, {"max_new_tokens": max_new_tokens}, model)
    messages = [str(each.message) for each in caught]
    assert len(messages) == count
    for message in messages:
        assert "a prompt of 3 tokens and max_new_tokens=14 go beyond" in message
        assert "max_position_embeddings=16" in message
        assert "use max_new_tokens of at most 13" in message
