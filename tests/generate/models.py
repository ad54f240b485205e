"""Tiny models for the tests of generation, and calls of ``generate`` on the ranks of a layout.

``generate(calls, layout)`` starts the ranks of a layout, which load each model from a Hugging Face directory and
generate from the prompts; returns the sequences in the order of the calls.
"""

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.convert.registry import model_config
from lightning_megatron.models.config import ModelConfig
from tests.families.parity import pretrained_module, tiny_model
from tests.families.t5_models import mt5, t5, t5_1_1
from tests.families.test_experts import FAMILIES as MIXTURES
from tests.families.test_experts import mixture
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.marks import on_gpus
from tests.models import VOCAB_SIZE
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import run_ranks

POSITIONS = 40
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *MIXTURES)},
    "gpt2": ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.1}),  # generation disables dropout
    "mistral": ("mistral", {"head_dim": 8}),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}
        | {"max_position_embeddings": 12},
    ),
    "latent_dense": (
        "deepseek_v3",
        {"first_k_dense_replace": 4, "q_lora_rank": None, "rope_parameters": None},
    ),
    "falcon_40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
}
"""GPT families and variants by name: the family, and config fields that differ from its tiny model."""

ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "t5_1_1": t5_1_1,
    "mt5": mt5,
}
"""Tied and scaled embeddings; untied; six layers."""
BERTS = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForQuestionAnswering")
NO_END: dict[str, Any] = {"eos_token_id": ()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of ``generate``."""

    model: str
    """A key of ``MODELS`` or ``ENCODER_DECODERS``."""
    input_ids: Tensor
    attention_mask: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)


@functools.cache
def hf_model(name: str) -> Any:
    """The transformers model with random weights."""
    # With several threads on shared cores a tiny model is ten times slower.
    torch.set_num_threads(1)
    if name in ENCODER_DECODERS:
        return _scale_up(ENCODER_DECODERS[name]())
    if name in BERTS:
        return _bert(name)
    family, changes = MODELS[name]
    fields = (FAMILIES | MIXTURES)[family][1]
    positions = {
        key: POSITIONS for key in ("n_positions", "max_position_embeddings") if key in fields
    }
    if family in MIXTURES:
        return mixture(family, **positions, output_router_logits=False, **changes)
    return gpt_model(family, positions | changes)


def model_of(name: str) -> ModelConfig:
    """``ModelConfig`` of the model ``name``."""
    return model_config(hf_model(name).config)


def _bert(head: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    labels = {"num_labels": 2 if head == "ForQuestionAnswering" else 5}
    config = transformers.MegatronBertConfig(
        intermediate_size=48, max_position_embeddings=24, **sizes, **labels
    )
    return tiny_model(getattr(transformers, f"MegatronBert{head}"), config)


def _scale_up(model: Any) -> Any:
    """A copy with larger weights: its completions do not repeat one token, and positions matter."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("DenseReluDense.wo.weight"):
                weight *= 4
            if name.endswith("relative_attention_bias.weight"):
                weight *= 10
    return model


def prompts(
    side: str = "left",
    lengths: tuple[int, ...] = (7, 3, 1, 5),
    width: int = 7,
) -> tuple[Tensor, ...]:
    """Token ids and attention mask [b, width], padded on ``side``; the real tokens do not depend on ``side``."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.full((len(lengths), width), 2)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        positions = slice(width - length, None) if side == "left" else slice(length)
        tokens[row, positions] = torch.randint(
            3,
            VOCAB_SIZE,
            (length,),
            generator=generator,
        )
        mask[row, positions] = 1
    return tokens, mask


def layouts_on_gpus(*layouts: Layout) -> list[Any]:
    """Layouts as test parameters, each marked with the number of GPUs that it needs."""
    return [on_gpus(layout.world_size, layout, id=str(layout)) for layout in layouts]


def make_call(
    model: str,
    rows: tuple[Tensor, ...] | None = None,
    **options: Any,
) -> Call:
    """A call with ``rows`` (token ids and mask), by default those of ``prompts``."""
    ids, mask = rows or prompts("right" if model in ENCODER_DECODERS else "left")
    return Call(model=model, input_ids=ids, attention_mask=mask, options=options)


@functools.cache
def hf_output(call: Call) -> Tensor:
    """Output of transformers; without a cache for T5s, since 5.23 makes one with the encoder's number of layers."""
    options = {
        "do_sample": False,
        "use_cache": call.model not in ENCODER_DECODERS,
        **call.options,
    }
    options.pop("static_cache", None)
    eos = options.pop("eos_token_id", None)
    if eos is not None:
        options |= (
            {"eos_token_id": list(eos)}
            if eos
            else {"pad_token_id": 0, **options, "eos_token_id": -1}
        )
    output: Tensor = hf_model(call.model).generate(
        call.input_ids, attention_mask=call.attention_mask, **options
    )
    return output


def compare(calls: Sequence[Call], layout: Layout, **case: Any) -> None:
    """Assert that every rank generates the sequences of transformers."""
    for call, actual in zip(
        calls,
        generate(
            calls,
            layout,
            **case,
        ),
        strict=True,
    ):
        assert actual.tolist() == hf_output(call).tolist(), (call.model, call.options)


def generate(
    calls: Sequence[Call],
    layout: Layout,
    **case: Any,
) -> list[Tensor]:
    """Sequences by call; asserts that they are equal on every rank."""
    first, *others = run_with_models(generate_on_ranks, layout, calls, **case)
    for other in others:
        assert all(map(torch.equal, first, other))
    return first  # type: ignore[no-any-return]


def run_with_models(
    function: Callable[..., Any],
    layout: Layout,
    calls: Sequence[Call | str],
    *more: Any,
    **case: Any,
) -> list[Any]:
    """Run ``function(directory, case, calls, *more)`` on every rank; ``directory`` holds the models of the calls."""
    directory = Path(tempfile.mkdtemp(prefix="generate_"))
    try:
        for name in {call if isinstance(call, str) else call.model for call in calls}:
            hf_model(name).save_pretrained(directory / name)
        settings = Case(layout=layout, steps=1, **case)
        return run_ranks(
            function,
            layout.world_size,
            str(directory),
            settings,
            list(calls),
            *more,
        )
    finally:
        shutil.rmtree(directory)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def set_up(directory: str, case: Case, name: str) -> Any:
    """A module with model chunks built and weights loaded."""
    module = pretrained_module(f"{directory}/{name}")
    row = {
        "input_ids": torch.arange(4),
        "labels": torch.arange(4),
    }
    rows = [row] * (case.layout.dp * case.layout.num_microbatches)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=case.layout.num_microbatches)  # type: ignore[arg-type]
    trainer_of(case).validate(module, loader, verbose=False)
    return module


def generate_on_ranks(
    directory: str,
    case: Case,
    calls: list[Call],
) -> list[Tensor]:
    modules = {}
    sequences = []
    for call in calls:
        if call.model not in modules:
            modules[call.model] = set_up(directory, case, call.model)
        sequences.append(
            modules[call.model].generate(
                call.input_ids,
                call.attention_mask,
                **call.options,
            )
        )
    return sequences
