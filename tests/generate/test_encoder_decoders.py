"""T5 and mT5 generate the sequences of transformers at every pipeline layout; the encoder runs once."""

import functools
from typing import Any

import pytest
import torch

from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.generate.logits_processors import logits_processors
from lightning_megatron.generate.request import build_request
from lightning_megatron.generate.sampler import sample_tokens, uniform_numbers
from tests.generate.models import (
    ENCODER_DECODERS,
    NO_END,
    Call,
    compare,
    generate,
    hf_model,
    hf_output,
    make_call,
    model_of,
    prompts,
    run_with_models,
    set_up,
)
from tests.marks import exhaustive
from tests.parity.training import FOUR_RANKS, TP2_SP, Case, Layout, refusal

START = 2


def _split(*layers: int, vpp: int | None = None) -> Layout:
    parts = (("pipeline_model_parallel_layout", layers),)
    return Layout(pp=2, vpp=vpp, num_microbatches=2, transformer_config_overrides=parts)


ONE = ("t5_1_1",)
EVERY = tuple(ENCODER_DECODERS)
CASES = (
    (TP2_SP, EVERY),
    (_split(2, 5), ONE),
    (_split(0, 4, 2, 1, vpp=2), ONE),
)
RARER_CASES = (
    (Layout(pp=2, num_microbatches=2, recompute="full"), EVERY),
    (FOUR_RANKS, EVERY),
    (_split(7, 0), ONE),
)


@functools.cache
def calls_of_every_t5() -> list[Call]:
    """Each model without end-of-sequence and with early ends of some rows; one model also with other options."""
    calls = []
    for name, side in zip(ENCODER_DECODERS, ("right", "left", "right"), strict=True):
        rows = prompts(side)
        endless = make_call(name, rows, max_new_tokens=12, **NO_END)
        ends = tuple(hf_output(endless)[:2, 5].tolist())
        early = make_call(
            name, rows, max_new_tokens=12, min_new_tokens=3, pad_token_id=1, eos_token_id=ends
        )
        calls += [
            endless,
            early,
            *(_option_calls(name, rows, ends[:1]) if name in ONE else ()),
        ]
    return calls


def _option_calls(
    name: str,
    rows: tuple[torch.Tensor, ...],
    end: tuple[int, ...],
) -> list[Call]:
    # Decoder prompts: rows without the start token, and rows with padding.
    ragged: dict[str, Any] = {
        "decoder_input_ids": torch.tensor(
            [
                [2, 5, 9],
                [2, 2, 7],
                [2, 2, 2],
                [2, 6, 6],
            ]
        ),
        "decoder_attention_mask": torch.tensor(
            [
                [1, 1, 1],
                [0, 1, 1],
                [0, 0, 1],
                [1, 1, 1],
            ]
        ),
        "max_new_tokens": 6,
        "num_beams": 2,
        "min_length": 6,
        "pad_token_id": 1,
    }
    several: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 8,
        "pad_token_id": 1,
    }
    begun = {
        "decoder_input_ids": rows[0][:, :2] + 1,
        "max_length": 9,
        "no_repeat_ngram_size": 2,
    }
    return [
        make_call(name, rows, **several, eos_token_id=end),
        make_call(name, rows, repetition_penalty=1.7, max_new_tokens=8, **NO_END),
        make_call(name, rows, **begun, **NO_END),
        make_call(name, rows, **ragged, eos_token_id=end),
    ]


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        *CASES,
        *(exhaustive(*case) for case in RARER_CASES),
    ],
    ids=str,
)
def test_sequences_equal_hugging_face(layout: Layout, models: tuple[str, ...]) -> None:
    compare([call for call in calls_of_every_t5() if call.model in models], layout)


def test_sampling_from_hugging_face_logits_draws_the_same_tokens() -> None:
    options: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9, "top_p_decay": 0.9},
        {"top_k": 20, "temperature": 0.8},
    )
    calls = [
        make_call(
            "mt5",
            prompts(),
            max_new_tokens=8,
            seed=5,
            **o,
            **NO_END,
        )
        for o in options
    ]
    for call, actual in zip(calls, generate(calls, Layout(tp=2, pp=2)), strict=True):
        assert actual.tolist() == _sample_by_hand(call).tolist()


@torch.no_grad()
def _sample_by_hand(call: Call) -> torch.Tensor:
    tokens = torch.full((len(call.input_ids), 1), START)
    request = build_request(
        {"input_ids": call.input_ids},
        call.options,
        model_of(call.model),
    )
    for uniform in uniform_numbers(request.options.seed, request.max_new_tokens, len(tokens)):
        model = hf_model(call.model)
        logits = model(
            call.input_ids, attention_mask=call.attention_mask, decoder_input_ids=tokens
        ).logits[:, -1]
        for processor in logits_processors(request):
            logits = processor(tokens, logits)
        tokens = torch.cat(
            (tokens, sample_tokens(logits, uniform)[:, None]),
            dim=-1,
        )
    return tokens


IDS = torch.ones(1, 2).long()
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("generate", {"bos_token_id": 3}, "bos_token_id=3 is for prompts of GPTs"),
    (
        "generate",
        {"decoder_input_ids": IDS},
        "decoder_input_ids: expected 2 rows, as input_ids have, got 1",
    ),
    ("generate", {"decoder_attention_mask": IDS}, "t5 needs decoder_input_ids here"),
    ("logits", {}, "t5 needs decoder_input_ids here"),
)


def test_encoder_runs_once_and_wrong_inputs_are_refused() -> None:
    call = make_call(
        "t5",
        prompts(lengths=(7, 3)),
        max_new_tokens=4,
        **NO_END,
    )
    ((lengths, refusals),) = run_with_models(_lengths_and_refusals, Layout(), [call])
    assert lengths == {"encoder": [7], "cross": [7, 0, 0, 0], "decoder": [1, 1, 1, 1]}
    for error, (_, _, message) in zip(refusals, REFUSED, strict=True):
        assert message in error


def _lengths_and_refusals(
    directory: str, case: Case, calls: list[Call]
) -> tuple[dict[str, list[int]], list[str]]:
    module = set_up(directory, case, "t5")
    call = calls[0]
    (chunk,) = (unwrap(chunk) for chunk in module.model_chunks)
    cross = chunk.decoder.layers[0].cross_attention.linear_kv
    parts = {"encoder": chunk.encoder, "cross": cross, "decoder": chunk.decoder}
    lengths: dict[str, list[int]] = {name: [] for name in parts}
    for name, part in parts.items():
        part.register_forward_pre_hook(
            lambda _, inputs, name=name: lengths[name].append(len(inputs[0])),
        )
    module.generate(call.input_ids, call.attention_mask, **call.options)
    refusals = [
        refusal(getattr(module, method), call.input_ids, **arguments)
        for method, arguments, _ in REFUSED
    ]
    return lengths, refusals
