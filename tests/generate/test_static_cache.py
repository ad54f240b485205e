"""Static KV cache: decoding steps replayed as CUDA graphs; on a CPU, tapes stand in for graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.static_steps import uses_static_cache
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
from tests.marks import exhaustive, on_gpus
from tests.parity.training import INTERLEAVED, TP2_SP, Case, Layout, refusal

TWO_BY_TWO = Layout(
    tp=2,
    pp=2,
    sequence_parallel=True,
    num_microbatches=2,
    recompute="selective",
)
EVERY = (
    "gpt2",
    "gpt_bigcode",
    "llama",
    "mistral",
    "qwen3",
    "bloom",
    "falcon_40b",
    "falcon_alibi",
    "gemma2",
    "latent_dense",
    "qwen3_5_text",
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"top_p": 0.9, "seed": 7},
)


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        (Layout(), EVERY),
        (TWO_BY_TWO, ("gpt2", "mistral", "bloom")),
        exhaustive(INTERLEAVED, ("llama",)),
        exhaustive(Layout(tp=4), ("gpt_bigcode",)),
    ],
    ids=str,
)
def test_recorded_steps_equal_hugging_face(layout: Layout, models: tuple[str, ...]) -> None:
    calls = [
        make_call(
            name,
            max_new_tokens=10,
            static_cache=True,
            **NO_END,
        )
        for name in models
    ]
    for sequences, counts in run_with_models(_record, layout, calls, 1024):
        for call, actual in zip(calls, sequences, strict=True):
            assert actual.tolist() == hf_output(call).tolist(), call.model
        # One step warms up, eight are replayed; one recording for each model chunk and group of rows.
        works = layout.vpp or layout.pp
        assert counts == [(works, works, 8 * works)] * len(calls)


def test_attention_window_grows_with_the_sequences() -> None:
    plain = [
        make_call(name, max_new_tokens=16, **o, **NO_END)
        for name in ("mistral", "bloom")
        for o in OPTIONS
    ]
    static = [replace(call, options={**call.options, "static_cache": True}) for call in plain]
    ((sequences, counts),) = run_with_models(
        _record,
        Layout(),
        plain + static,
        8,
    )
    for call, growing, fixed in zip(
        plain,
        sequences[: len(plain)],
        sequences[len(plain) :],
        strict=True,
    ):
        assert torch.equal(growing, fixed), (call.model, call.options)
    # Positions 7 to 21 need windows of 8, 16 and all 24 slots; each window starts with a warm-up step.
    assert counts == [(3, 2, 12)] * len(static)


def test_static_cache_is_the_default_where_it_is_possible_and_pays() -> None:
    gpu = torch.device("cuda", 0)
    cpu = torch.device("cpu")
    # Frequencies depend on the length; the host counts tokens per expert.
    dynamic = (
        "llama_dynamic",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "dots1",
        "glm4_moe",
        "deepseek_v3",
        "gpt_oss",
        "ernie4_5_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
    )
    assert {name for name in MODELS if not uses_static_cache(None, 8, model_of(name), gpu)} == set(
        dynamic
    )
    cases = (
        (None, 7, gpu),
        (None, 8, cpu),
        (True, 8, gpu),
        (False, 8, gpu),
    )
    defaults = [
        uses_static_cache(option, new, model_of("llama"), device) for option, new, device in cases
    ]
    assert defaults == [False, False, True, False]
    for name, reason in (("llama_dynamic", "frequencies .dynamic."), ("t5", "cross-attention")):
        with pytest.raises(ConfigError, match=f"static_cache=True: .* {reason}"):
            uses_static_cache(True, 8, model_of(name), gpu)


# ---- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("layout", "models"),
    [
        on_gpus(1, Layout(), (*EVERY, "olmo2")),
        on_gpus(2, TP2_SP, (*EVERY, "olmo2")),
        on_gpus(2, Layout(pp=2), ("gpt2", "llama", "bloom")),
        on_gpus(2, INTERLEAVED, ("llama",)),
        on_gpus(
            4,
            Layout(tp=2, pp=2),
            ("llama", "bloom"),
        ),
    ],
    ids=str,
)
def test_graphs_equal_their_kernels(
    layout: Layout, models: tuple[str, ...], precision: str
) -> None:
    calls = [
        make_call(
            name,
            max_new_tokens=12,
            **o,
            **NO_END,
        )
        for name in models
        for o in OPTIONS
    ]
    for results in run_with_models(
        _generate_three_times, layout, calls, precision=precision, accelerator="gpu"
    ):
        for call, (growing, kernels, graphs, (before, after)) in zip(calls, results, strict=True):
            assert after == before, call.model
            assert torch.equal(graphs, kernels), (call.model, call.options)
            # In bf16, other kernels round differently, which may break ties between tokens differently.
            if precision == "32-true":
                assert torch.equal(graphs, growing), (call.model, call.options)


@pytest.mark.gpu(1)
def test_uncapturable_step_is_refused_and_runs_without_graphs() -> None:
    call = make_call("llama", max_new_tokens=8, **NO_END)
    ((before, error, after),) = run_with_models(
        _synchronize_in_steps, Layout(), [call], accelerator="gpu"
    )
    assert "static_cache: expected steps that CUDA can capture as a graph, got: " in error
    assert "set static_cache=False" in error
    assert torch.equal(before, after)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _record(
    directory: str,
    case: Case,
    calls: list[Call],
    window: int,
) -> Any:
    """Sequences, and the counts of each recorder."""
    from lightning_megatron.generate import cuda_graphs, static_steps

    recorders: list[TapeRecorder] = []

    def graph_recorder(device: torch.device) -> TapeRecorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    static_steps.MIN_WINDOW = window
    cuda_graphs.graph_recorder = graph_recorder  # type: ignore[assignment]
    return generate_on_ranks(directory, case, calls), [recorder.counts for recorder in recorders]


def _generate_three_times(
    directory: str,
    case: Case,
    calls: list[Call],
) -> list[Any]:
    """Sequences of growing caches, of static ones without graphs and with; memory after each call with graphs."""
    from lightning_megatron.generate import cuda_graphs

    graph_recorder = cuda_graphs.graph_recorder
    modules = {
        name: set_up(directory, case, name) for name in dict.fromkeys(call.model for call in calls)
    }
    results = []
    for call in calls:
        generate = _generator(modules[call.model], call)
        growing = generate(False)
        cuda_graphs.graph_recorder = lambda device: None
        kernels = generate(True)
        cuda_graphs.graph_recorder = graph_recorder
        memory = []
        for _ in range(3):  # the first call allocates compiled kernels and library workspaces
            graphs = generate(True)
            torch.cuda.empty_cache()
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        results.append((growing, kernels, graphs, memory[1:]))
    return results


def _synchronize_in_steps(
    directory: str,
    case: Case,
    calls: list[Call],
) -> Any:
    """The error when recorded steps synchronize with the device, and the sequences before and without graphs."""
    from lightning_megatron.engine.ops.key_value_cache import TokenStep

    generate = _generator(set_up(directory, case, calls[0].model), calls[0])
    before = generate(False)
    original = TokenStep.additive_mask

    def synchronize(self: TokenStep, *args: Any) -> torch.Tensor:
        self.slot.item()
        return original(self, *args)

    TokenStep.additive_mask = synchronize  # type: ignore[assignment, method-assign]
    return before, refusal(generate, True), generate(False)


def _generator(module: Any, call: Call) -> Callable[[bool], torch.Tensor]:
    return lambda static: module.generate(
        call.input_ids, call.attention_mask, static_cache=static, **call.options
    )
