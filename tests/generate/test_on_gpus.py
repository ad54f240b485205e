"""GPUs write, compute and count what Hugging Face's models do on a CPU, each kind of call as it comes by default."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generate.models import BERTS, MODELS, NO_END, asked, compare, run_with_models
from tests.generate.test_encoder_decoders import calls_of_every_t5
from tests.generate.test_predicted_logits import LENGTHS, expected_logits, predicted, rows_of
from tests.parity.training import Case, Layout
from tests.ranks import run_ranks
from tests.trainer.test_text_evaluation import _last_words, _losses, _tested, folder

__all__ = ["folder"]

ATOL = 5e-5
"""Logits of size 1 to 10 in fp32, out of four to seven layers, by kernels that add in another order."""


def _on_gpus(*layouts: Layout) -> list[Any]:
    return [pytest.param(layout, marks=pytest.mark.gpu(layout.world_size), id=str(layout)) for layout in layouts]


@pytest.mark.parametrize("layout", _on_gpus(Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(dp=2)))
def test_every_gpt_writes_what_hugging_face_writes(layout: Layout) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.5})
    calls = [asked(name, max_new_tokens=12, **way, **NO_END) for name in MODELS for way in ways]
    compare(calls, layout, accelerator="gpu")


@pytest.mark.parametrize("layout", _on_gpus(Layout(), Layout(tp=2), Layout(pp=2, num_microbatches=2)))
def test_every_t5_writes_what_hugging_face_writes(layout: Layout) -> None:
    compare(calls_of_every_t5(), layout, accelerator="gpu")


@pytest.mark.parametrize("layout", _on_gpus(Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)))
def test_logits_are_those_of_hugging_face_and_come_back_in_order(layout: Layout) -> None:
    names = ("gpt2", "qwen3", "bloom", "mistral", "t5", "t5_1_1", *BERTS[:3])
    for answers in run_with_models(predicted, layout, names, accelerator="gpu"):
        for name, (shared, together) in zip(names, answers, strict=True):
            expected = expected_logits(name)
            real = rows_of(name)["attention_mask"] == 1 if name in MODELS else slice(None)
            for actual in (shared.cpu(), torch.stack(together).cpu()):
                assert len(actual) == len(LENGTHS)
                torch.testing.assert_close(actual[real], expected[real], rtol=0.0, atol=ATOL)


@pytest.mark.parametrize("layout", _on_gpus(Layout(), Layout(tp=2), Layout(dp=2)))
def test_last_words_and_perplexity_are_those_of_hugging_face(folder: Path, layout: Layout) -> None:  # noqa: F811
    losses, right = _losses(folder, _last_words(folder))
    mean = torch.cat(losses).mean().item()
    for found in run_ranks(_tested, layout.world_size, str(folder), Case(layout=layout, accelerator="gpu")):
        assert found["last_word"]["test_last_word_accuracy"] == pytest.approx(sum(right) / len(right), rel=1e-14)
        # fp32 logits of four layers by other kernels.
        assert found["last_word"]["test_loss"] == pytest.approx(mean, rel=1e-5)
        assert found["last_word"]["test_perplexity"] == pytest.approx(math.exp(mean), rel=5e-5)
