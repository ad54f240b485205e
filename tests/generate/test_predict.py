"""``Trainer.predict`` continues every prompt of a loader once, each copy of the model its own."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.families.parity import pretrained_module
from tests.generate.models import NO_END, Call, asked, by_hugging_face, prompts, run_with_models
from tests.parity.training import Case, Layout, trainer_of

LENGTHS = (7, 3, 5, 6, 2)
"""No multiple of the copies or of a batch."""


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(tp=2, dp=2)),
        ("llama", Layout(pp=2)),
        pytest.param("llama", Layout(cp=2, dp=2), marks=pytest.mark.exhaustive),
        pytest.param("mt5", Layout(cp=2, pp=2), marks=pytest.mark.exhaustive),
        ("mt5", Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)),
        pytest.param("mt5", Layout(dp=3), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_prompt_is_continued_once(model: str, layout: Layout) -> None:
    call = asked(model, prompts("left" if model == "llama" else "right", LENGTHS), max_new_tokens=5, **NO_END)
    expected = by_hugging_face(call)
    answers = run_with_models(_predicted, layout, [call])
    of_copies: dict[int, list[list[int]]] = {}
    for dp_rank, texts in answers:
        assert of_copies.setdefault(dp_rank, texts) == texts
    # A distributed sampler deals samples in turn.
    for dp_rank, texts in of_copies.items():
        assert texts == expected[dp_rank :: layout.dp].tolist()


def _predicted(directory: str, case: Case, calls: list[Call]) -> tuple[int, list[list[int]]]:
    from lightning_megatron import GenerationOptions

    (call,) = calls
    module = pretrained_module(f"{directory}/{call.model}")
    module.generation = GenerationOptions(**call.options)
    assert call.attention_mask is not None
    rows = [{"input_ids": i, "attention_mask": m} for i, m in zip(call.input_ids, call.attention_mask, strict=True)]
    if call.model == "mt5":  # a batch of Megatron's, whose answers are no part of the question
        rows = [
            {"text_enc": i, "enc_mask": m.expand(7, 7), "text_dec": i, "labels": i, "dec_mask": m}
            for i, m in zip(call.input_ids, call.attention_mask, strict=True)
        ]
    trainer = trainer_of(case)
    predictions = trainer.predict(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return trainer.strategy.topology.dp_rank, [text for batch in predictions for text in batch.tolist()]
