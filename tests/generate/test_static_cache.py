"""Static caches write the same texts by steps that a GPU could replay; a tape stands for its graphs."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.families.parity import pretrained_module
from tests.generate.models import NO_END, Call, asked, by_hugging_face, continued, run_with_models, written
from tests.generate.tape import Tape, TapeRecorder
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import RankError

TWO_BY_TWO = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2, recompute="selective")
EVERY = ("gpt2", "gpt_bigcode", "llama", "mistral", "qwen3", "bloom", "falcon_40b", "falcon_alibi", "gemma2")


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        (Layout(), EVERY),
        (TWO_BY_TWO, ("gpt2", "mistral", "bloom")),
        pytest.param(Layout(pp=2, vpp=2, num_microbatches=2), ("llama",), marks=pytest.mark.exhaustive),
        pytest.param(Layout(tp=4), ("gpt_bigcode",), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_recorded_steps_write_what_hugging_face_writes(layout: Layout, models: tuple[str, ...]) -> None:
    calls = [asked(name, max_new_tokens=10, static_cache=True, **NO_END) for name in models]
    for answers, counts in run_with_models(_recorded_answers, layout, calls):
        for call, actual in zip(calls, answers, strict=True):
            assert actual.tolist() == by_hugging_face(call).tolist(), call.model
        # One step prepares, the eight that follow are replayed; each chunk and each group of rows has a recording.
        works = layout.vpp or layout.pp
        assert counts == [(works, works, 8 * works)] * len(calls)


def test_predict_which_lightning_runs_in_inference_mode_replays_steps() -> None:
    call = asked("llama", max_new_tokens=10, **NO_END)
    ((texts, counts),) = run_with_models(_predicted, Layout(), [call])
    assert texts.tolist() == by_hugging_face(call).tolist()
    assert counts == [(1, 1, 8)]


def test_texts_outgrow_what_steps_look_at_and_nothing_stays() -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9, "seed": 5}, {"num_beams": 2})
    plain = [asked(name, max_new_tokens=16, **way, **NO_END) for name in ("mistral", "bloom") for way in ways]
    static = [replace(call, options={**call.options, "static_cache": True}) for call in plain]
    ((answers, recorders, alive),) = run_with_models(_answers_with_small_windows, Layout(), plain + static)
    for call, growing, fixed in zip(plain, answers[: len(plain)], answers[len(plain) :], strict=True):
        assert torch.equal(growing, fixed), (call.model, call.options)
    # Places 7 to 21 are looked at in 8 slots, then 16, then all 24: each starts with a step that prepares.
    assert recorders == [(3, 2, 12)] * len(static)
    assert alive == 0


def test_a_rank_that_cannot_record_makes_all_go_on_without() -> None:
    calls = [asked("llama", max_new_tokens=6, static_cache=static, **NO_END) for static in (False, True)]
    ranks = run_with_models(_answers_where_rank_1_cannot_record, Layout(tp=2), calls)
    for growing, static, _, _ in ranks:
        assert torch.equal(growing, static)
    assert [replayed for *_, replayed in ranks] == [0, 0]
    assert [len(warned) for _, _, warned, _ in ranks] == [0, 1]
    assert "no room" in ranks[1][2][0]


@pytest.mark.parametrize(
    ("model", "reason"), [("llama_dynamic", "frequencies (dynamic)"), ("t5", "attends to a source")]
)
def test_models_whose_steps_differ_are_refused(model: str, reason: str) -> None:
    with pytest.raises(RankError) as caught:
        continued([asked(model, max_new_tokens=4, static_cache=True)], Layout(tp=2))
    assert caught.value.error_type == "ConfigError"
    assert "static_cache=True" in str(caught.value)
    assert reason in str(caught.value)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _recording() -> list[TapeRecorder]:
    """The recorders of the calls from now on."""
    from lightning_megatron.generate import pipeline

    recorders: list[TapeRecorder] = []

    def recorder_of(device: torch.device) -> TapeRecorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    pipeline.recorder_of = recorder_of  # type: ignore[assignment]
    return recorders


def _counts(recorders: list[TapeRecorder]) -> list[tuple[int, int, int]]:
    return [(r.num_prepared, r.num_recorded, r.num_replayed) for r in recorders]


def _recorded_answers(directory: str, case: Case, calls: list[Call]) -> Any:
    recorders = _recording()
    return written(directory, case, calls), _counts(recorders)


def _predicted(directory: str, case: Case, calls: list[Call]) -> Any:
    from lightning_megatron import GenerationOptions

    recorders = _recording()
    module = pretrained_module(f"{directory}/{calls[0].model}")
    module.generation = GenerationOptions(max_new_tokens=10, eos_token_id=(), static_cache=True)
    batch = {"input_ids": calls[0].input_ids, "attention_mask": calls[0].attention_mask}
    (texts,) = trainer_of(case).predict(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    return texts, _counts(recorders)


def _answers_with_small_windows(directory: str, case: Case, calls: list[Call]) -> Any:
    """Answers, what was recorded, and how many caches and steps outlived their call without help from the collector."""
    from lightning_megatron.engine.fillers.kv_cache import StaticCache, TokenStep
    from lightning_megatron.generate import pipeline

    pipeline.SMALLEST_WINDOW = 8
    made: list[weakref.ref[Any]] = []
    for owner in (StaticCache, TokenStep, pipeline.StaticSteps, Tape):

        def remembered(self: Any, *args: Any, _original: Any = owner.__init__, **kwargs: Any) -> None:
            _original(self, *args, **kwargs)
            made.append(weakref.ref(self))

        owner.__init__ = remembered  # type: ignore[method-assign]
    recorders = _recording()
    gc.disable()
    answers = written(directory, case, calls)
    alive = sum(ref() is not None for ref in made)
    assert len(made) > 10
    return answers, _counts(recorders), alive


def _answers_where_rank_1_cannot_record(directory: str, case: Case, calls: list[Call]) -> Any:
    recorders = _recording()
    if os.environ["RANK"] == "1":
        original = TapeRecorder.recorded

        def refuse(self: TapeRecorder, works: Any) -> Any:
            original(self, works)  # a tape, unlike a GPU, computes meanwhile, and rank 0 waits for it
            raise RuntimeError("no room")

        TapeRecorder.recorded = refuse  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        growing, static = written(directory, case, calls)
    warned = [str(warning.message) for warning in caught if "CUDA graph" in str(warning.message)]
    return growing, static, warned, sum(recorder.num_replayed for recorder in recorders)
