"""Replayed CUDA graphs write what the same steps write kernel by kernel, and their memory comes back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.generate.models import NO_END, Call, asked, run_with_models, set_up
from tests.parity.training import Case, Layout

MODELS = ("gpt2", "gpt_bigcode", "llama", "mistral", "qwen3", "bloom", "falcon_40b", "falcon_alibi", "gemma2", "olmo2")
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3, "num_return_sequences": 2}, {"top_p": 0.9, "seed": 7})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("layout", "models"),
    [
        pytest.param(Layout(), MODELS, marks=pytest.mark.gpu(1)),
        pytest.param(Layout(tp=2, sequence_parallel=True), MODELS, marks=pytest.mark.gpu(2)),
        pytest.param(Layout(pp=2), ("gpt2", "llama", "bloom"), marks=pytest.mark.gpu(2)),
        pytest.param(Layout(pp=2, vpp=2, num_microbatches=2), ("llama",), marks=pytest.mark.gpu(2)),
        pytest.param(Layout(tp=2, pp=2), ("llama", "bloom"), marks=pytest.mark.gpu(4)),
    ],
    ids=str,
)
def test_graphs_write_what_their_kernels_write(layout: Layout, models: tuple[str, ...], precision: str) -> None:
    calls = [asked(name, max_new_tokens=12, **way, **NO_END) for name in models for way in WAYS]
    ranks = run_with_models(_three_ways, layout, calls, precision=precision, accelerator="gpu")
    works = layout.vpp or layout.pp
    for found in ranks:
        for call, (growing, kernels, graphs, num_recorded, warned) in zip(calls, found, strict=True):
            assert not warned, (call.model, warned)
            assert num_recorded == works, call.model
            assert torch.equal(graphs, kernels), (call.model, call.options)
            # In 16 bits other kernels round otherwise, and a tie of two tokens may be broken the other way.
            if precision == "32-true":
                assert torch.equal(graphs, growing), (call.model, call.options)


@pytest.mark.gpu(1)
def test_memory_comes_back_and_texts_outgrow_what_steps_look_at() -> None:
    calls = [asked(name, max_new_tokens=20, **NO_END) for name in ("llama", "bloom")]
    (found,) = run_with_models(_memory_of_calls, Layout(), calls, accelerator="gpu")
    for same_text, num_recorded, allocated, reserved in found:
        assert same_text
        assert num_recorded == 2  # of 16 and of all 32 slots; of the first 8 only one step is left, which prepares
        # The first call leaves compiled kernels, libraries' workspaces and cached angles behind; no other adds to it.
        assert allocated[1:] == [allocated[1]] * (len(allocated) - 1), allocated
        assert reserved[1:] == [reserved[1]] * (len(reserved) - 1), reserved


@pytest.mark.gpu(1)
def test_a_step_that_cannot_be_recorded_runs_kernel_by_kernel() -> None:
    call = asked("llama", max_new_tokens=8, **NO_END)
    (found,) = run_with_models(_steps_that_ask, Layout(), [call], accelerator="gpu")
    expected, actual, warned, after, num_recorded_after = found
    assert torch.equal(actual, expected)
    assert len(warned) == 1
    assert "could not be recorded" in warned[0]
    # Nothing is left of the failure: the allocator frees what it has cached, and the next call records.
    assert torch.equal(after, expected)
    assert num_recorded_after == 1


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _counted() -> list[int]:
    """Appended to: how many graphs each recording made."""
    from lightning_megatron.generate.pipeline import CudaGraphs

    counts: list[int] = []
    original = CudaGraphs.recorded

    def counting(self: CudaGraphs, works: Sequence[Any]) -> list[Any]:
        recorded = original(self, works)
        counts.append(len(recorded))
        return recorded

    CudaGraphs.recorded = counting  # type: ignore[method-assign]
    return counts


def _three_ways(directory: str, case: Case, calls: list[Call]) -> list[Any]:
    """Growing caches, static ones kernel by kernel, static ones by graphs; how many graphs, and what was warned of."""
    from lightning_megatron.generate import pipeline

    recorder_of, counts = pipeline.recorder_of, _counted()
    modules = {name: set_up(directory, case, name) for name in dict.fromkeys(call.model for call in calls)}
    found = []
    for call in calls:
        write = _writer(modules[call.model], call)
        growing = write(False)
        pipeline.recorder_of = lambda device: None
        kernels = write(True)
        pipeline.recorder_of = recorder_of
        counts.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graphs = write(True)
        found.append((growing, kernels, graphs, sum(counts), _about_graphs(caught)))
    return found


def _memory_of_calls(directory: str, case: Case, calls: list[Call]) -> list[Any]:
    from lightning_megatron.generate import pipeline

    pipeline.SMALLEST_WINDOW = 8
    counts = _counted()
    found = []
    for call in calls:
        write = _writer(set_up(directory, case, call.model), call)
        growing = write(False)
        allocated, reserved = [], []
        for _ in range(4):
            counts.clear()
            text = write(True)
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
        found.append((torch.equal(text, growing), sum(counts), allocated, reserved))
    return found


def _steps_that_ask(directory: str, case: Case, calls: list[Call]) -> Any:
    """What is written where a step asks the device for a number while it is recorded, and afterwards."""
    from lightning_megatron.engine.fillers.kv_cache import TokenStep

    write = _writer(set_up(directory, case, calls[0].model), calls[0])
    expected = write(False)
    original = TokenStep.scores

    def asking(self: TokenStep, *args: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.place.item()
        return original(self, *args)

    TokenStep.scores = asking  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = write(True)
    TokenStep.scores = original  # type: ignore[method-assign]
    torch.cuda.empty_cache()
    counts = _counted()
    after = write(True)
    return expected, actual, _about_graphs(caught), after, sum(counts)


def _writer(module: Any, call: Call) -> Callable[[bool], torch.Tensor]:
    return lambda static: module.generate(call.input_ids, call.attention_mask, static_cache=static, **call.options)


def _about_graphs(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if "CUDA graph" in str(warning.message)]
