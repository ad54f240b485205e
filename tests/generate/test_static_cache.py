"""Steps of one shape, replayed as CUDA graphs, write the same texts; on a CPU a tape stands for graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.pipeline import uses_static_cache
from tests.generate.models import (
    MODELS,
    NO_END,
    Call,
    generate_on_ranks,
    hf_output,
    make_call,
    model_of,
    run_with_models,
    set_up,
)
from tests.generate.tape import TapeRecorder
from tests.parity.training import Case, Layout, refusal

TWO_BY_TWO = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2, recompute="selective")
EVERY = ("gpt2", "gpt_bigcode", "llama", "mistral", "qwen3", "bloom", "falcon_40b", "falcon_alibi", "gemma2")
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3, "num_return_sequences": 2}, {"top_p": 0.9, "seed": 7})


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
    calls = [make_call(name, max_new_tokens=10, static_cache=True, **NO_END) for name in models]
    for answers, counts in run_with_models(_recorded, layout, calls, 1024):
        for call, actual in zip(calls, answers, strict=True):
            assert actual.tolist() == hf_output(call).tolist(), call.model
        # One step prepares, the eight that follow are replayed; each chunk and each group of rows has a recording.
        works = layout.vpp or layout.pp
        assert counts == [(works, works, 8 * works)] * len(calls)


def test_texts_outgrow_what_steps_look_at() -> None:
    plain = [make_call(name, max_new_tokens=16, **way, **NO_END) for name in ("mistral", "bloom") for way in WAYS]
    static = [replace(call, options={**call.options, "static_cache": True}) for call in plain]
    ((answers, counts),) = run_with_models(_recorded, Layout(), plain + static, 8)
    for call, growing, fixed in zip(plain, answers[: len(plain)], answers[len(plain) :], strict=True):
        assert torch.equal(growing, fixed), (call.model, call.options)
    # Places 7 to 21 are looked at in 8 slots, then 16, then all 24: each starts with a step that prepares.
    assert counts == [(3, 2, 12)] * len(static)


def test_gpus_replay_every_model_whose_steps_are_alike_where_tokens_are_enough_to_gain() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    # Frequencies by the text's length, and experts whose tokens the host counts.
    unlike = ("llama_dynamic", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
    assert {name for name in MODELS if not uses_static_cache(None, 8, model_of(name), gpu)} == set(unlike)
    asked = ((None, 7, gpu), (None, 8, cpu), (True, 8, gpu), (False, 8, gpu))
    found = [uses_static_cache(said, new, model_of("llama"), at) for said, new, at in asked]
    assert found == [False, False, True, False]
    for name, reason in (("llama_dynamic", "frequencies .dynamic."), ("t5", "cross-attention")):
        with pytest.raises(ConfigError, match=f"static_cache=True: .* {reason}"):
            uses_static_cache(True, 8, model_of(name), gpu)


# ---- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("layout", "models"),
    [
        pytest.param(Layout(), (*EVERY, "olmo2"), marks=pytest.mark.gpu(1)),
        pytest.param(Layout(tp=2, sequence_parallel=True), (*EVERY, "olmo2"), marks=pytest.mark.gpu(2)),
        pytest.param(Layout(pp=2), ("gpt2", "llama", "bloom"), marks=pytest.mark.gpu(2)),
        pytest.param(Layout(pp=2, vpp=2, num_microbatches=2), ("llama",), marks=pytest.mark.gpu(2)),
        pytest.param(Layout(tp=2, pp=2), ("llama", "bloom"), marks=pytest.mark.gpu(4)),
    ],
    ids=str,
)
def test_graphs_write_what_their_kernels_write(layout: Layout, models: tuple[str, ...], precision: str) -> None:
    calls = [make_call(name, max_new_tokens=12, **way, **NO_END) for name in models for way in WAYS]
    for found in run_with_models(_three_ways, layout, calls, precision=precision, accelerator="gpu"):
        for call, (growing, kernels, graphs, (before, after)) in zip(calls, found, strict=True):
            assert after == before, call.model
            assert torch.equal(graphs, kernels), (call.model, call.options)
            # In 16 bits other kernels round otherwise, and a tie of two tokens may be broken the other way.
            if precision == "32-true":
                assert torch.equal(graphs, growing), (call.model, call.options)


@pytest.mark.gpu(1)
def test_a_step_that_cannot_be_recorded_is_refused_and_runs_kernel_by_kernel() -> None:
    call = make_call("llama", max_new_tokens=8, **NO_END)
    ((before, refusal, after),) = run_with_models(_steps_that_ask, Layout(), [call], accelerator="gpu")
    assert "static_cache: expected steps that CUDA can capture as a graph, got: " in refusal
    assert "set static_cache=False" in refusal
    assert torch.equal(before, after)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _recorded(directory: str, case: Case, calls: list[Call], window: int) -> Any:
    """Answers, and what was recorded."""
    from lightning_megatron.generate import pipeline

    recorders: list[TapeRecorder] = []

    def graph_recorder(device: torch.device) -> TapeRecorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    pipeline.MIN_WINDOW, pipeline.graph_recorder = window, graph_recorder  # type: ignore[assignment]
    return generate_on_ranks(directory, case, calls), [recorder.counts for recorder in recorders]


def _three_ways(directory: str, case: Case, calls: list[Call]) -> list[Any]:
    """Growing caches, static ones kernel by kernel, by graphs; and the memory after each such call."""
    from lightning_megatron.generate import pipeline

    graph_recorder = pipeline.graph_recorder
    modules = {name: set_up(directory, case, name) for name in dict.fromkeys(call.model for call in calls)}
    found = []
    for call in calls:
        write = _writer(modules[call.model], call)
        growing = write(False)
        pipeline.graph_recorder = lambda device: None
        kernels = write(True)
        pipeline.graph_recorder = graph_recorder
        memory = []
        for _ in range(3):  # the first call leaves compiled kernels and libraries' workspaces behind
            graphs = write(True)
            torch.cuda.empty_cache()
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        found.append((growing, kernels, graphs, memory[1:]))
    return found


def _steps_that_ask(directory: str, case: Case, calls: list[Call]) -> Any:
    """What is said where a step asks the device for a number while it is recorded, and what is written without."""
    from lightning_megatron.engine.fillers.attention import TokenStep

    write = _writer(set_up(directory, case, calls[0].model), calls[0])
    before, original = write(False), TokenStep.additive_mask

    def asking(self: TokenStep, *args: Any) -> torch.Tensor:
        self.slot.item()
        return original(self, *args)

    TokenStep.additive_mask = asking  # type: ignore[method-assign]
    return before, refusal(write, True), write(False)


def _writer(module: Any, call: Call) -> Callable[[bool], torch.Tensor]:
    return lambda static: module.generate(call.input_ids, call.attention_mask, static_cache=static, **call.options)
