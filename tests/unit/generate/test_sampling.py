"""Are tokens chosen as Hugging Face's logits processors and Megatron's server say, and as often as is probable?"""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import aligned
from lightning_megatron.generate.repeats import Repeats
from lightning_megatron.generate.sampling import (
    drawn,
    min_p_only,
    penalized,
    shaped,
    top_k_only,
    top_p_only,
    uniform_numbers,
    without,
)

VOCAB_SIZE = 50


def _logits(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 2, 7, VOCAB_SIZE])
def test_top_k_equals_hugging_face(k: int) -> None:
    from transformers import TopKLogitsWarper

    logits = _logits()
    logits[0, :10] = 5.0  # as likely as each other: all stay
    assert torch.equal(top_k_only(logits, k), TopKLogitsWarper(k)(None, logits.clone()))


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_equals_hugging_face(p: float) -> None:
    from transformers import TopPLogitsWarper

    logits = _logits()
    assert torch.equal(top_p_only(logits, p), TopPLogitsWarper(p)(None, logits.clone()))


@pytest.mark.parametrize("p", [1e-6, 0.05, 0.5, 1.0])
def test_min_p_equals_hugging_face(p: float) -> None:
    from transformers import MinPLogitsWarper

    logits = _logits()
    logits[0, :10] = 20.0  # as likely as each other: all stay
    assert torch.equal(min_p_only(logits, p), MinPLogitsWarper(p)(None, logits.clone()))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_repeated_runs_equal_hugging_face(size: int) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    tokens = torch.randint(4, (6, 14), generator=torch.Generator().manual_seed(size))
    for length in range(1, 14):  # of which some are of the prompt
        prompts = aligned(tokens[:, : min(length, 3)], None)
        new = tokens[:, min(length, 3) : length]
        expected = NoRepeatNGramLogitsProcessor(size)(tokens[:, :length], _logits())
        assert torch.equal(Repeats(prompts, size).without(_logits(), new), expected)
    assert torch.isinf(expected).any()


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_equals_hugging_face(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, tokens = _logits(), torch.randint(VOCAB_SIZE, (6, 9), generator=torch.Generator().manual_seed(1))
    is_repeated = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, tokens, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    assert torch.equal(penalized(logits, is_repeated, penalty), expected)


def test_hidden_tokens_are_never_chosen_and_those_outside_the_vocabulary_do_not_matter() -> None:
    logits = without(_logits(), (3, VOCAB_SIZE, -1, 9))
    assert (logits[:, [3, 9]] == -torch.inf).all()
    assert torch.equal(logits[:, 10:], _logits()[:, 10:])


def test_top_p_decays_from_the_second_token_on_down_to_its_bound() -> None:
    options = GenerationOptions(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    assert [options.top_p_at(step) for step in range(4)] == [0.8, 0.4, 0.3, 0.3]
    assert GenerationOptions(top_p=0.8).top_p_at(5) == 0.8
    kept = [int(torch.isfinite(shaped(_logits(1) / 6, options, step)).sum()) for step in range(4)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[2] == kept[3] >= 1


def test_logits_that_are_no_numbers_choose_a_token_of_the_vocabulary() -> None:
    assert int(drawn(torch.full((1, 5), torch.nan), torch.tensor([0.5], dtype=torch.float64))) in range(5)


def test_shaping_divides_by_the_temperature_before_tokens_are_removed() -> None:
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

    chain = LogitsProcessorList([TemperatureLogitsWarper(2.5), TopPLogitsWarper(0.7), MinPLogitsWarper(0.2)])
    expected = chain(None, _logits())
    options = GenerationOptions(temperature=2.5, top_p=0.7, min_p=0.2)
    torch.testing.assert_close(shaped(_logits(), options, 0), expected)


def test_drawn_tokens_are_as_frequent_as_they_are_probable() -> None:
    draws, probabilities = 20_000, torch.tensor([0.5, 0.0, 0.2, 0.15, 0.1, 0.05])
    uniform = uniform_numbers(seed=7, steps=1, rows=draws)[0]
    tokens = drawn(probabilities.log().expand(draws, -1), uniform)
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[1] == 0
    expected = draws * probabilities.double()
    seen = expected > 0
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    # Four degrees of freedom: 18.47 is exceeded once in a thousand seeds.
    assert chi_square < 18.47


def test_the_seed_alone_decides_about_the_numbers() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = uniform_numbers(3, 4, 5)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, uniform_numbers(3, 4, 5))
    assert not torch.equal(first, uniform_numbers(4, 4, 5))
