"""Texts are those that Hugging Face writes, for every family, in every layout, whatever ends them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.generate.models import MODELS, Call, continued, hugging_face, prompts
from tests.parity.training import Layout

LAYOUTS = (
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, recompute="full"),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2, recompute="selective"),
)


NO_END: dict[str, Any] = {"eos_token_id": ()}


def _written_by_hugging_face(name: str, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    written: torch.Tensor = hugging_face(name).generate(ids, attention_mask=mask, do_sample=False, **options)
    return written


@functools.cache
def _calls_and_answers() -> list[tuple[Call, torch.Tensor]]:
    """Each family thrice: rows that never end, rows of which some end early, and the best of several beams."""
    ids, mask = prompts()
    pairs = []
    for name in MODELS:
        whole = _written_by_hugging_face(name, ids, mask, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)
        ends = [int(token) for token in whole[:2, ids.shape[1] + 4]]
        options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 3, "pad_token_id": 1}
        ended = _written_by_hugging_face(name, ids, mask, eos_token_id=ends, **options)
        endless = Call(model=name, input_ids=ids, attention_mask=mask, options={"max_new_tokens": 12} | NO_END)
        pairs.append((endless, whole))
        pairs.append((replace(endless, options={**options, "eos_token_id": tuple(ends)}), ended))
        beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "pad_token_id": 1}
        best = _written_by_hugging_face(name, ids, mask, eos_token_id=ends[:1], **beams)
        pairs.append((replace(endless, options={**beams, "eos_token_id": ends[0]}), best))
    return pairs


@pytest.mark.parametrize(
    "layout", [LAYOUTS[1], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in LAYOUTS[2:])], ids=str
)
def test_every_family_writes_what_hugging_face_writes(layout: Layout) -> None:
    _compare(_calls_and_answers(), layout)


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=2, num_microbatches=2), Layout(dp=3)], ids=str)
def test_each_kind_of_positions_does_with_chunks_and_copies(layout: Layout) -> None:
    models = ("gpt2", "llama_dynamic", "mistral", "bloom")
    _compare([pair for pair in _calls_and_answers() if pair[0].model in models], layout)


def _compare(pairs: list[tuple[Call, torch.Tensor]], layout: Layout) -> None:
    calls, expected = zip(*pairs, strict=True)
    for call, actual, hf in zip(calls, continued(list(calls), layout), expected, strict=True):
        assert actual.tolist() == hf.tolist(), (call.model, call.options)


def test_the_side_of_the_padding_and_the_other_rows_change_nothing() -> None:
    left, left_mask = prompts("left")
    right, right_mask = prompts("right")
    options = {"max_new_tokens": 8} | NO_END
    calls = []
    for name in ("gpt2", "mistral", "bloom"):
        calls.append(Call(model=name, input_ids=left, attention_mask=left_mask, options=options))
        calls.append(Call(model=name, input_ids=right, attention_mask=right_mask, options=options))
        calls.extend(
            Call(model=name, input_ids=row[m == 1][None], options=options)
            for row, m in zip(left, left_mask, strict=True)
        )
    answers = continued(calls, Layout(pp=2))
    for first in range(0, len(calls), 6):
        on_left, on_right, *alone = answers[first : first + 6]
        assert torch.equal(on_right[:, :7], right)
        assert torch.equal(on_left[:, 7:], on_right[:, 7:])
        assert torch.equal(on_left[:, 7:], torch.cat([row[:, -8:] for row in alone]))


def test_more_ranks_than_key_value_heads() -> None:
    ids, mask = prompts()
    options = {"max_new_tokens": 8} | NO_END
    calls = [Call(model=n, input_ids=ids, attention_mask=mask, options=options) for n in ("gpt_bigcode", "falcon_40b")]
    for call, actual in zip(calls, continued(calls, Layout(tp=4)), strict=True):
        hf = _written_by_hugging_face(call.model, ids, mask, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
        assert actual.tolist() == hf.tolist(), call.model


def test_repetition_penalty_runs_lengths_stop_sequences_and_the_models_own_end() -> None:
    ids, _ = prompts(lengths=(7, 7, 7))
    hf = hugging_face("llama")
    penalized = hf.generate(ids, do_sample=False, max_new_tokens=12, repetition_penalty=1.7, eos_token_id=-1)
    plain = hf.generate(ids, do_sample=False, max_new_tokens=30)  # the config's eos_token_id
    whole = hf.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=-1)
    new = whole[0, 7:].tolist()
    stop = new[3:5]
    end = next(n for n in range(2, 13) if new[n - 2 : n] == stop)
    stopping: dict[str, Any] = {"max_new_tokens": 12, "stop_sequences": (tuple(stop),), "pad_token_id": 1} | NO_END
    calls = [
        Call(model="llama", input_ids=ids, options={"max_new_tokens": 12, "repetition_penalty": 1.7} | NO_END),
        Call(model="llama", input_ids=ids, options={"max_new_tokens": 30}),
        Call(model="llama", input_ids=ids, options=stopping),
        Call(model="llama", input_ids=ids[:1], options=stopping),
    ]
    # Lengths with the prompt; the end that is held back is likely early.
    lengths: dict[str, Any] = {"max_length": 17, "min_length": 13, "no_repeat_ngram_size": 2, "pad_token_id": 1}
    ends = {"eos_token_id": (new[1], new[2])}
    for options in (lengths, {**lengths, "num_beams": 3, "num_return_sequences": 3}):
        calls.append(Call(model="llama", input_ids=ids, options={**options, **ends}))
    answers = continued(calls, Layout(tp=2))
    for call, actual in zip(calls[-2:], answers[-2:], strict=True):
        expected = hf.generate(ids, do_sample=False, **call.options | {"eos_token_id": list(ends["eos_token_id"])})
        assert actual.tolist() == expected.tolist(), call.options
        assert 13 <= actual.shape[1] <= 17
    assert answers[0].tolist() == penalized.tolist()
    assert answers[1].tolist() == plain.tolist()
    assert answers[2][0].tolist() == whole[0, : 7 + end].tolist() + [1] * (12 - end)
    assert answers[2][1:].tolist() == whole[1:].tolist()
    assert answers[3].tolist() == whole[:1, : 7 + end].tolist()


def test_a_first_token_is_put_before_the_prompts() -> None:
    ids, mask = prompts()
    options = {"max_new_tokens": 6, "bos_token_id": 1} | NO_END
    (actual,) = continued([Call(model="gpt2", input_ids=ids, attention_mask=mask, options=options)], Layout(dp=2))
    for row, row_mask, text in zip(ids, mask, actual, strict=True):
        prompt = torch.cat((torch.tensor([1]), row[row_mask == 1]))[None]
        hf = _written_by_hugging_face("gpt2", prompt, torch.ones_like(prompt), max_new_tokens=6, eos_token_id=-1)
        assert text[-hf.shape[1] :].tolist() == hf[0].tolist()


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.exhaustive)])
def test_sixteen_bits_write_what_hugging_face_writes_in_them(precision: str) -> None:
    import copy

    ids, mask = prompts(lengths=(7,))
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    model = copy.deepcopy(hugging_face("llama")).to(dtype)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, eos_token_id=-1)
    call = Call(model="llama", input_ids=ids, options={"max_new_tokens": 6} | NO_END)
    (actual,) = continued([call], Layout(pp=2), precision=precision)
    assert actual.tolist() == expected.tolist()
