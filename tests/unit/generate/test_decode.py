"""How tokens are chosen and rows end, beside transformers' processors where these can be asked."""

from __future__ import annotations

import torch

from lightning_megatron.generate.decode import (
    distribution_processors,
    drawn,
    readable,
    token_processors,
    uniform_numbers,
)
from lightning_megatron.generate.inputs import aligned
from lightning_megatron.generate.options import GenerationOptions

VOCAB_SIZE = 50


def _logits(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_padding_says_nothing() -> None:
    tokens = torch.tensor([[5, 6, 5], [7, 9, 8]])
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    prompts = aligned(tokens, mask)
    options = GenerationOptions(repetition_penalty=2.0, no_repeat_ngram_size=1, min_new_tokens=1, eos_token_id=4)
    for shaped in token_processors(options, prompts):
        scores = shaped(readable(prompts), torch.ones(2, VOCAB_SIZE))
        changed = [set(row.nonzero().flatten().tolist()) for row in scores != 1.0]
        assert changed in ([{5, 6}, {7, 8}], [{4}, {4}])


def test_top_p_decays_from_the_second_token_on_down_to_its_bound() -> None:
    options = GenerationOptions(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    (decaying,) = distribution_processors(options, 3)
    texts = torch.zeros(1, 6, dtype=torch.long)
    kept = [int(torch.isfinite(decaying(texts[:, : 3 + step], _logits(1) / 6)).sum()) for step in range(4)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[2] == kept[3] >= 1


def test_logits_that_are_no_numbers_choose_a_token_of_the_vocabulary() -> None:
    assert int(drawn(torch.full((1, 5), torch.nan), torch.tensor([0.5], dtype=torch.float64))) in range(5)


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
