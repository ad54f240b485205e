"""Models that the tests of generation ask, on the ranks of a layout.

``generate(calls, layout)`` starts the ranks of a layout, which load each model from a directory that Hugging Face has
written and continue the prompts; what every rank got comes back, in the order of the calls.
"""

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.convert.registry import model_config
from lightning_megatron.models.config import ModelConfig
from tests.families.parity import VOCAB_SIZE, pretrained_module, tiny_model
from tests.families.t5_models import mt5, t5, t5_1_1
from tests.families.test_experts import FAMILIES as MIXTURES
from tests.families.test_experts import mixture
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import run_ranks

POSITIONS = 40
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *MIXTURES)},
    "gpt2": ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.1}),  # which generation leaves out
    "mistral": ("mistral", {"head_dim": 8}),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}
        | {"max_position_embeddings": 12},
    ),
    "falcon_40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
}
"""Each family of GPTs, and variants: the family, and other fields than those of its tiny model."""

ENCODER_DECODERS: dict[str, Callable[[], Any]] = {"t5": t5, "t5_1_1": t5_1_1, "mt5": mt5}
"""Tied and scaled; with an output layer of its own; of six layers."""


BERTS = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForQuestionAnswering")

NO_END: dict[str, Any] = {"eos_token_id": ()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of ``generate``."""

    model: str
    """A key of ``MODELS`` or ``ENCODER_DECODERS``."""
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)


@functools.cache
def hf_model(name: str) -> Any:
    """The model by transformers, with random weights."""
    # Between threads on shared cores a tiny model takes ten times as long.
    torch.set_num_threads(1)
    if name in ENCODER_DECODERS:
        return _lively(ENCODER_DECODERS[name]())
    if name in BERTS:
        return _bert(name)
    family, changes = MODELS[name]
    fields = (FAMILIES | MIXTURES)[family][1]
    positions = {key: POSITIONS for key in ("n_positions", "max_position_embeddings") if key in fields}
    if family in MIXTURES:
        return mixture(family, **positions, output_router_logits=False, **changes)
    return gpt_model(family, positions | changes)


def model_of(name: str) -> ModelConfig:
    """What a model computes."""
    return model_config(hf_model(name).config)


def _bert(head: str) -> Any:
    import transformers

    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    labels = {"num_labels": 2 if head == "ForQuestionAnswering" else 5}
    config = transformers.MegatronBertConfig(intermediate_size=48, max_position_embeddings=24, **sizes, **labels)
    return tiny_model(getattr(transformers, f"MegatronBert{head}"), config)


def _lively(model: Any) -> Any:
    """A copy whose texts do not repeat one token, and in which places matter."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("DenseReluDense.wo.weight"):
                weight *= 4
            if name.endswith("relative_attention_bias.weight"):
                weight *= 10
    return model


def prompts(side: str = "left", lengths: tuple[int, ...] = (7, 3, 1, 5), width: int = 7) -> tuple[torch.Tensor, ...]:
    """Tokens and their mask, [b, width]; the real tokens of a row are the same on both sides."""
    generator = torch.Generator().manual_seed(4)
    tokens, mask = torch.full((len(lengths), width), 2), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, None) if side == "left" else slice(length)
        tokens[row, place] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
        mask[row, place] = 1
    return tokens, mask


def on_gpus(*layouts: Layout) -> list[Any]:
    """The layouts as parameters of a test that needs as many GPUs."""
    return [pytest.param(layout, marks=pytest.mark.gpu(layout.world_size), id=str(layout)) for layout in layouts]


def make_call(model: str, rows: tuple[torch.Tensor, ...] | None = None, **options: Any) -> Call:
    """A call with these rows of tokens and mask, else with those of ``prompts``."""
    ids, mask = rows or prompts("right" if model in ENCODER_DECODERS else "left")
    return Call(model=model, input_ids=ids, attention_mask=mask, options=options)


@functools.cache
def hf_output(call: Call) -> torch.Tensor:
    """What transformers writes, without a cache for T5s: 5.23 makes one of as many layers as the encoder has."""
    options = {"do_sample": False, "use_cache": call.model not in ENCODER_DECODERS, **call.options}
    options.pop("static_cache", None)
    eos = options.pop("eos_token_id", None)
    if eos is not None:
        options |= {"eos_token_id": list(eos)} if eos else {"pad_token_id": 0, **options, "eos_token_id": -1}
    written: torch.Tensor = hf_model(call.model).generate(call.input_ids, attention_mask=call.attention_mask, **options)
    return written


def compare(calls: Sequence[Call], layout: Layout, **case: Any) -> None:
    """Every rank must get from each call what Hugging Face writes."""
    for call, actual in zip(calls, generate(calls, layout, **case), strict=True):
        assert actual.tolist() == hf_output(call).tolist(), (call.model, call.options)


def generate(calls: Sequence[Call], layout: Layout, **case: Any) -> list[torch.Tensor]:
    """What rank 0 got from each call; every rank must have got the same."""
    first, *answers = run_with_models(generate_on_ranks, layout, calls, **case)
    for others in answers:
        assert all(torch.equal(mine, other) for mine, other in zip(first, others, strict=True))
    return first  # type: ignore[no-any-return]


def run_with_models(
    function: Callable[..., Any], layout: Layout, calls: Sequence[Call | str], *more: Any, **case: Any
) -> list[Any]:
    """``function(directory, case, calls, *more)`` of every rank; ``directory`` has the models that the calls name."""
    directory = Path(tempfile.mkdtemp(prefix="generate_"))
    try:
        for name in {call if isinstance(call, str) else call.model for call in calls}:
            hf_model(name).save_pretrained(directory / name)
        of_case = Case(layout=layout, steps=1, **case)
        return run_ranks(function, layout.world_size, str(directory), of_case, list(calls), *more)
    finally:
        shutil.rmtree(directory)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def set_up(directory: str, case: Case, name: str) -> Any:
    """A module with its chunks built and its weights loaded."""
    module = pretrained_module(f"{directory}/{name}")
    row = {"input_ids": torch.arange(4), "labels": torch.arange(4)}
    rows = [row] * (case.layout.dp * case.layout.num_microbatches)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=case.layout.num_microbatches)  # type: ignore[arg-type]
    trainer_of(case).validate(module, loader, verbose=False)
    return module


def generate_on_ranks(directory: str, case: Case, calls: list[Call]) -> list[torch.Tensor]:
    modules = {}
    answers = []
    for call in calls:
        if call.model not in modules:
            modules[call.model] = set_up(directory, case, call.model)
        answers.append(modules[call.model].generate(call.input_ids, call.attention_mask, **call.options))
    return answers
