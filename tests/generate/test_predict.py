"""Does ``Trainer.predict`` continue every prompt of a loader once, each copy of the model its own?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.families.parity import pretrained_module
from tests.generate.models import Call, hugging_face, prompts, run_with_models
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import RankError

LENGTHS = (7, 3, 5, 6, 2)
"""No multiple of the copies or of a batch."""


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(pp=2)], ids=str)
def test_every_prompt_is_continued_once(layout: Layout) -> None:
    ids, mask = prompts(lengths=LENGTHS)
    expected = hugging_face("llama").generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=5, eos_token_id=-1, pad_token_id=1
    )
    answers = run_with_models(_predicted, layout, [Call(model="llama", input_ids=ids, attention_mask=mask)])
    of_copies: dict[int, list[list[int]]] = {}
    for dp_rank, texts in answers:
        assert of_copies.setdefault(dp_rank, texts) == texts
    # A distributed sampler deals samples in turn.
    for dp_rank, texts in of_copies.items():
        assert texts == expected[dp_rank :: layout.dp].tolist()


def _predicted(directory: str, case: Case, calls: list[Call]) -> tuple[int, list[list[int]]]:
    from lightning_megatron import GenerationOptions

    module = pretrained_module(f"{directory}/llama")
    module.generation = GenerationOptions(max_new_tokens=5, eos_token_id=())
    assert calls[0].attention_mask is not None
    rows = [
        {"input_ids": i, "attention_mask": m} for i, m in zip(calls[0].input_ids, calls[0].attention_mask, strict=True)
    ]
    trainer = trainer_of(case)
    predictions = trainer.predict(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return trainer.strategy.topology.dp_rank, [text for batch in predictions for text in batch.tolist()]


def test_batches_without_prompts_are_refused() -> None:
    with pytest.raises(RankError, match="batch keys text have no 'input_ids', which predict continues"):
        run_with_models(_without_prompts, Layout(), [Call(model="llama", input_ids=torch.zeros(1, 1))])


def _without_prompts(directory: str, case: Case, calls: list[Call]) -> Any:
    rows = DataLoader([{"text": torch.arange(4)}], batch_size=1)  # type: ignore[arg-type, var-annotated]
    return trainer_of(case).predict(pretrained_module(f"{directory}/llama"), rows)
