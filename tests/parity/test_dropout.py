"""Dropout masks differ between ranks with different activations, and are equal between ranks with the same ones.

Masks (True where a value was dropped) come from real forward passes: for activations from dropout's output; for
attention by calling the same kernel, with the same random state, so that it returns the attention weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.families.parity import padded_sentences
from tests.families.test_gpts import CONFIGS
from tests.parity.comparison import assert_same_run
from tests.parity.training import (
    FOUR_RANKS,
    MODELS,
    PP2,
    SEQ_LENGTH,
    TP2,
    TP2_SP,
    Case,
    Layout,
    loader_of,
    module_of,
    outcome,
    trainer_of,
)
from tests.ranks import run_ranks

PROBABILITY = 0.25


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Dropout masks of one rank, in calling order."""

    activations: list[Tensor] = field(default_factory=list)
    """After the embedding (first stage), then after each attention and MLP block: [s, b, h], or [s/tp, b, h]."""
    attention: list[Tensor] = field(default_factory=list)
    """[b, np/tp, s, s]; True above the diagonal, which causality masks anyway."""
    probabilities: list[float] = field(default_factory=list)
    """Dropout probabilities of both kinds."""


def are_independent(a: Tensor, b: Tensor) -> bool:
    """Whether two masks are independent: the share of values dropped in one that are dropped in the other as well.

    With thousands of values it lies within 0.05 of ``PROBABILITY``; it is 1 if the masks are equal.
    """
    return abs(((a & b).sum() / a.sum()).item() - PROBABILITY) < 0.05


def dropout_masks(case: Case, function: str = "fit") -> Masks:
    """Return the masks of this rank in one training step (``fit``) or one validation (``validate``)."""
    masks = Masks()
    module = module_of(case)
    with recording(masks):
        getattr(trainer_of(case, max_steps=1), function)(module, loader_of(case))
    return masks


@contextmanager
def recording(masks: Masks) -> Iterator[None]:
    """While active, record the dropout masks of this process in ``masks``."""
    real_dropout = F.dropout
    real_attention = F.scaled_dot_product_attention
    is_inside = False

    def dropout(
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        # Under the CPU emulation, a TorchFunctionMode, torch's own function calls this one again.
        nonlocal is_inside
        if is_inside or not training or p == 0:
            return real_dropout(x, p, training, inplace)
        is_inside = True
        out = real_dropout(x, p, training, inplace)
        is_inside = False
        masks.activations.append((out == 0).detach())
        masks.probabilities.append(p)
        return out

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        probability = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
        if probability > 0:
            masks.probabilities.append(probability)
            state = torch.get_rng_state()
            identity = torch.eye(k.shape[-2]).expand(*k.shape[:-1], k.shape[-2])
            with torch.no_grad():
                weights = real_attention(
                    torch.zeros_like(q),
                    torch.zeros_like(k),
                    identity,
                    *args,
                    **kwargs,
                )
            masks.attention.append(weights == 0)
            torch.set_rng_state(state)
        return real_attention(q, k, v, *args, **kwargs)

    with (
        patch("torch.nn.functional.dropout", dropout),
        patch("torch.nn.functional.scaled_dot_product_attention", attention),
    ):
        yield


# ---- the layouts -----------------------------------------------------------------------------------------------------

CASE = Case(
    model_fields=(
        ("embd_pdrop", PROBABILITY),
        ("resid_pdrop", PROBABILITY),
        ("attn_pdrop", PROBABILITY),
    )
)
# Not ReLU, whose zeros would look like dropped values.
T5 = Case(
    model="t5",
    model_fields=(("dropout_rate", PROBABILITY), ("feed_forward_proj", "gelu")),
)
NUM_LAYERS = 4


def _masks(layout: Layout, case: Case = CASE) -> list[Masks]:
    return run_ranks(dropout_masks, layout.world_size, replace(case, layout=layout))


def _visible(mask: Tensor) -> Tensor:
    """Select the part of an attention mask that causality leaves visible."""
    return mask[..., torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).tril()]


def _all_independent(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(are_independent(*masks) for masks in zip(a, b, strict=True))


LAYOUTS = (
    TP2,
    TP2_SP,
    *(Layout(cp=2, cp_comm_type=x) for x in ("a2a", "all_gather")),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masks_differ_between_ranks_unless_activations_are_equal(layout: Layout) -> None:
    first, second = _masks(layout)
    is_whole = layout == TP2
    assert [len(mask) for mask in first.activations] == [SEQ_LENGTH // (1 if is_whole else 2)] * (
        1 + 2 * NUM_LAYERS
    )
    if is_whole:
        assert all(
            torch.equal(a, b) for a, b in zip(first.activations, second.activations, strict=True)
        )
    else:
        assert _all_independent(first.activations, second.activations)
    if layout.cp_comm_type != "all_gather":  # attends in several calls, the first to few keys
        assert [mask.shape[1:] for mask in first.attention] == [
            (2, SEQ_LENGTH, SEQ_LENGTH)
        ] * NUM_LAYERS
        assert _all_independent(
            *([_visible(mask) for mask in each.attention] for each in (first, second))
        )


def test_t5_masks_differ_only_for_sharded_heads_and_mlps() -> None:
    first, second = _masks(TP2, T5)
    for a, b in zip(first.activations, second.activations, strict=True):
        is_inside_mlp = a.shape[-1] == MODELS["t5"]["d_ff"] // 2
        assert are_independent(a, b) if is_inside_mlp else torch.equal(a, b)
    # In the decoder, causally masked weights are zero as well.
    encoder = slice(0, MODELS["t5"]["num_layers"])
    assert _all_independent(first.attention[encoder], second.attention[encoder])


def test_masks_differ_between_stages_microbatches_and_layers() -> None:
    first, second = _masks(PP2)
    per_microbatch = len(first.activations) // 2
    embedding, *blocks = first.activations[:per_microbatch]
    assert per_microbatch == 1 + NUM_LAYERS
    assert are_independent(blocks[0], blocks[1])
    assert are_independent(embedding, first.activations[per_microbatch])
    assert all(map(are_independent, blocks, second.activations))


def test_validation_has_no_dropout() -> None:
    (masks,) = run_ranks(dropout_masks, 1, CASE, "validate")
    assert masks.activations == masks.attention == []


@pytest.mark.parametrize(
    ("case", "layout", "recompute"),
    [
        (CASE, FOUR_RANKS, {"recompute": "selective"}),
        (CASE, FOUR_RANKS, {"recompute": "full"}),
        (
            T5,
            Layout(tp=2, pp=2, vpp=2, num_microbatches=2),
            {"recompute": "full", "recompute_num_layers": 2},
        ),
    ],
)
def test_recomputation_repeats_dropout_masks(
    case: Case, layout: Layout, recompute: dict[str, Any]
) -> None:
    # ``outcome`` also checks that replicated weights stay equal.
    case = replace(case, layout=layout, steps=2)
    recomputed = replace(case, layout=replace(layout, **recompute))
    assert_same_run(outcome(recomputed), outcome(case))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "layout",
    [TP2, TP2_SP],
    ids=str,
)
def test_recomputation_repeats_dropout_masks_on_gpus(layout: Layout) -> None:
    # All four layers are recomputed, or only the first. Without recomputation other kernels draw other random numbers.
    case = replace(CASE, layout=layout, steps=3, accelerator="gpu")
    every_layer = replace(layout, recompute="full")
    first_layer = replace(every_layer, recompute_method="block")
    # In fp32, a single different mask changes the loss by far more than rounding does.
    assert_same_run(*(outcome(replace(case, layout=each)) for each in (every_layer, first_layer)))


# ---- compared with Hugging Face --------------------------------------------------------------------------------------

DROPOUTS: dict[str, dict[str, float]] = {
    "gpt2": {"embd_pdrop": 0.1, "resid_pdrop": 0.2, "attn_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "t5": {"dropout_rate": 0.3, "decoder_start_token_id": 0},
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_probabilities_equal_hugging_face_in_order(name: str) -> None:
    fields = {**CONFIGS, "t5": MODELS["t5"]}[name]
    ((ours, theirs),) = run_ranks(_probabilities, 1, {**fields, **DROPOUTS[name]})
    assert ours == theirs
    assert len(ours) >= 2


def _probabilities(fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Dropout probabilities of this package's model and of Hugging Face's."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from lightning_megatron import MegatronModule
    from lightning_megatron.convert.registry import config_object

    rows = padded_sentences()
    auto = AutoModelForSeq2SeqLM if fields["model_type"] == "t5" else AutoModelForCausalLM
    model = auto.from_config(config_object(fields)).train()
    ours = Masks()
    theirs = Masks()
    with recording(theirs):
        model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    module = MegatronModule(model=fields, make_vocab_size_divisible_by=8)
    trainer = trainer_of(Case(steps=1))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows))  # type: ignore[arg-type]
    with recording(ours):
        trainer.fit(module, loader)
    return ours.probabilities, theirs.probabilities
