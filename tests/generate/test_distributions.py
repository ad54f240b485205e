"""Are tokens drawn as often as Hugging Face's distribution says, by the model that really runs on stages?"""

from __future__ import annotations

from typing import Any

import torch

from tests.generate.models import Call, continued, hugging_face
from tests.parity.training import Layout

DRAWS = 2500
PROMPT = torch.tensor([[5, 41, 12]])
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": True},
    {"temperature": 1.7},
    {"temperature": 2.0, "top_k": 12},
    {"top_p": 0.8, "top_p_decay": 0.5, "top_p_bound": 0.3},
    {"temperature": 3.0, "min_p": 0.2},
)


def test_tokens_are_drawn_as_hugging_face_distributes_them() -> None:
    options = {"num_return_sequences": DRAWS, "eos_token_id": (), "seed": 11}
    calls = [
        Call(model="gpt2", input_ids=PROMPT, options={**options, **way, "max_new_tokens": 1 + ("top_p" in way)})
        for way in WAYS
    ]
    for way, texts in zip(WAYS, continued(calls, Layout(pp=2)), strict=True):
        first = texts[:, 3]
        _check(first, _distribution(PROMPT, way, 0))
        if "top_p" in way:
            # It has decayed once: the second tokens behind the most frequent first one.
            likeliest = int(first.mode().values)
            text = torch.cat((PROMPT, torch.tensor([[likeliest]])), dim=-1)
            _check(texts[first == likeliest, 4], _distribution(text, way, 1))


def _distribution(text: torch.Tensor, way: dict[str, Any], step: int) -> torch.Tensor:
    """[v], float64: by transformers' model and its processors of logits, in their order there."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    with torch.no_grad():
        logits = hugging_face("gpt2")(text).logits[:, -1]
    warpers: list[Any] = [TemperatureLogitsWarper(way.get("temperature", 1.0))]
    if "top_k" in way:
        warpers.append(TopKLogitsWarper(way["top_k"]))
    if "top_p" in way:
        warpers.append(TopPLogitsWarper((0.8, 0.4)[step]))
    if "min_p" in way:
        warpers.append(MinPLogitsWarper(way["min_p"]))
    for warper in warpers:
        logits = warper(text, logits)
    return logits[0].double().softmax(-1)


def _check(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's test; what is expected less than five times is one kind of token."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    is_rare = expected < 5
    counts = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
    expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    assert freedom >= 4, "nothing was left to chance"
    # Exceeded by one seed of ten thousand (Wilson and Hilferty 1931: the cube root is normal, 3.72 deviations).
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < limit
