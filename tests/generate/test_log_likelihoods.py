"""``MegatronModule.log_likelihoods`` equals the sums of transformers' log-probabilities, at every layout."""

from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate import log_likelihoods
from lightning_megatron.generate.log_likelihoods import Pair, plan_scoring
from tests.generate.models import hf_model, layouts_on_gpus, model_of, run_with_models, set_up
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.training import FOUR_RANKS, INTERLEAVED, PP2_DP2, TP2, Case, Layout

ATOL = 1e-4
"""Of a sum of up to a dozen log-probabilities."""
EXPERTS = Layout(dp=2, ep=2)


def _pairs() -> list[Pair]:
    generator = torch.Generator().manual_seed(8)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    contexts = [tokens(count) for count in (9, 1, 14, 5)]
    pairs: list[Pair] = [(context, tokens(3)) for context in contexts]
    # Answers of one token share a row; a longer one that ends in the same way shares it, too.
    pairs += [(contexts[0], [token]) for token in (5, 0, VOCAB_SIZE - 1, 5)]
    pairs += [(contexts[0][:4], [*contexts[0][4:], 17])]
    # The likeliest token, once alone and once behind another.
    with torch.no_grad():
        best = int(hf_model("gpt2")(torch.tensor([contexts[3]])).logits[0, -1].argmax())
    return [*pairs, (contexts[3], [best]), (contexts[3][:-1], [contexts[3][-1], best])]


@torch.no_grad()
def _expected(name: str, pairs: list[Pair]) -> tuple[list[float], list[bool]]:
    values = []
    is_greedy = []
    for context, rest in pairs:
        row = torch.tensor([[*context, *rest]])
        logits = hf_model(name)(row[:, :-1]).logits[0, -len(rest) :].float()
        targets = torch.tensor(rest)
        log_probabilities = logits.log_softmax(-1)
        values.append(float(log_probabilities.gather(-1, targets[:, None]).sum()))
        is_greedy.append(bool((logits.argmax(-1) == targets).all()))
    return values, is_greedy


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (FOUR_RANKS, ("gpt2", "gemma2")),
        (Layout(dp=3), ("gpt2",)),
        (EXPERTS, ("mixtral",)),
        exhaustive(Layout(), ("gpt2", "llama", "bloom")),
        exhaustive(PP2_DP2, ("gpt2", "llama_dynamic")),
        exhaustive(INTERLEAVED, ("qwen3",)),
        exhaustive(Layout(cp=2, tp=2), ("llama",)),
    ],
    ids=str,
)
def test_they_equal_hugging_face_in_the_order_of_the_pairs(
    layout: Layout,
    names: tuple[str, ...],
) -> None:
    _compare(layout, names)


@pytest.mark.parametrize(
    "layout",
    layouts_on_gpus(
        Layout(),
        TP2,
        Layout(pp=2),
        Layout(dp=2),
    ),
)
def test_on_gpus_they_equal_hugging_face(layout: Layout) -> None:
    _compare(layout, ("gpt2", "llama"), accelerator="gpu")


def _compare(layout: Layout, names: tuple[str, ...], **case: Any) -> None:
    pairs = _pairs()
    results = run_with_models(_score, layout, names, pairs, **case)
    replicas = 1 if layout == EXPERTS else layout.dp
    for index, name in enumerate(names):
        values, is_greedy = _expected(name, pairs)
        for of_rank in results:
            found, greedy, _ = of_rank[index]
            assert found == pytest.approx(values, abs=ATOL)
            assert greedy == is_greedy
        # Each continuation once: replicas share them, unless experts are spread over these.
        num_counted = sum(of_rank[index][2] for of_rank in results)
        assert num_counted == len(pairs) * layout.world_size // replicas


def _score(
    directory: str,
    case: Case,
    names: list[str],
    pairs: list[Pair],
) -> list[tuple[list[float], list[bool], int]]:
    results = []
    for name in names:
        module = set_up(directory, case, name)
        counts: list[int] = []
        # These rotary frequencies depend on the longest row of a batch.
        batch_size = 1 if name == "llama_dynamic" else 3
        found = module.log_likelihoods(pairs, batch_size=batch_size, on_batch=counts.append)
        results.append((found.values.tolist(), found.is_greedy.tolist(), sum(counts)))
    return results


def test_batches_have_rows_of_similar_length_and_limited_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("gpt2")
    pairs: list[Pair] = [([1] * length, [2, 3]) for length in (3, 9, 1, 7, 8)]
    # The same row as the second pair, though its continuation is longer.
    pairs += [([1] * 5, [1, 1, 1, 1, 2, 4])]
    plan = plan_scoring(pairs, 2, model)
    assert [[len(row.tokens) for row in batch] for batch in plan.batches] == [[10, 9], [8, 4], [2]]
    assert [plan.num_pairs_of(batch) for batch in range(3)] == [3, 2, 1]
    assert [plan.num_targets(batch) for batch in range(3)] == [5 + 2 + 2, 4, 2]
    monkeypatch.setattr(log_likelihoods, "MAX_LOGITS", 8 * model.vocab_size)
    plan = plan_scoring(pairs, 2, model)
    assert [len(batch) for batch in plan.batches] == [1, 2, 2]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([([1], [2]), ([], [2])], "pair 1: its context is empty"),
        ([([1], [])], "pair 0: its continuation is empty"),
        ([([1], [VOCAB_SIZE])], f"token {VOCAB_SIZE}: expected one of the vocabulary"),
        ([([1, -1], [2])], "token -1: expected"),
        ([([1] * 40, [2, 2])], "of 41 tokens need more positions than .*=40; cut the context"),
    ],
)
def test_pairs_that_the_model_cannot_read_are_refused(pairs: list[Pair], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_scoring(pairs, 1, model_of("gpt2"))


def test_only_gpts_are_scored() -> None:
    with pytest.raises(ConfigError, match="expected a GPT with an output layer, got a t5"):
        plan_scoring([([1], [2])], 1, model_of("t5"))
    with pytest.raises(ConfigError, match="batch_size=0 must be at least 1"):
        plan_scoring([([1], [2])], 0, model_of("gpt2"))
