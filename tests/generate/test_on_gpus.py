"""GPUs write, compute and count what Hugging Face's models do on a CPU, each kind of call as it comes by default."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generate.models import MODELS, Call, continued, hugging_face, prompts
from tests.generate.test_encoder_decoders import _calls_and_answers
from tests.generate.test_predicted_logits import BERTS, LENGTHS, _expected, _predicted, _rows, _run
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
    ids, mask = prompts()
    ways: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.5})
    calls, expected = [], []
    for name in MODELS:
        for way in ways:
            options: dict[str, Any] = {"max_new_tokens": 12, **way}
            calls.append(Call(model=name, input_ids=ids, attention_mask=mask, options={**options, "eos_token_id": ()}))
            alone = {"attention_mask": mask, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
            expected.append(hugging_face(name).generate(ids, **alone, **options))
    for call, actual, hf in zip(calls, continued(calls, layout, accelerator="gpu"), expected, strict=True):
        assert actual.tolist() == hf.tolist(), (call.model, call.options)


@pytest.mark.parametrize("layout", _on_gpus(Layout(), Layout(tp=2), Layout(pp=2, num_microbatches=2)))
def test_every_t5_writes_what_hugging_face_writes(layout: Layout) -> None:
    calls, expected = zip(*_calls_and_answers(), strict=True)
    for call, actual, hf in zip(calls, continued(list(calls), layout, accelerator="gpu"), expected, strict=True):
        assert actual.tolist() == hf.tolist(), (call.model, call.options)


@pytest.mark.parametrize("layout", _on_gpus(Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)))
def test_logits_are_those_of_hugging_face_and_come_back_in_order(layout: Layout) -> None:
    names = ("gpt2", "qwen3", "bloom", "mistral", "t5", "t5_1_1", *BERTS[:3])
    for answers in _run(_predicted, layout, names, accelerator="gpu"):
        for name, (shared, together) in zip(names, answers, strict=True):
            expected = _expected(name)
            real = _rows(name)["attention_mask"] == 1 if name in MODELS else slice(None)
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
