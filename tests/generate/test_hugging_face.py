"""Texts are those that Hugging Face writes, for every family, in every layout, whatever ends them."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.convert.registry import known_families
from tests.generate.models import (
    MODELS,
    NO_END,
    Call,
    asked,
    by_hugging_face,
    compare,
    continued,
    hugging_face,
    on_gpus,
    prompts,
    run_with_models,
    set_up,
)
from tests.generate.test_encoder_decoders import calls_of_every_t5
from tests.parity.training import Case, Layout

LAYOUTS = (
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, recompute="full"),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2, recompute="selective"),
)

FEW = ("gpt2", "llama_dynamic", "mistral", "bloom")
"""Models of each kind of positions."""


@functools.cache
def calls_of(names: tuple[str, ...], *, ends: bool = True) -> list[Call]:
    """Each model thrice: rows that never end, rows of which some end early, and the best of several beams."""
    calls = []
    for name in names:
        calls.append(asked(name, max_new_tokens=12, **NO_END))
        if ends:
            some = tuple(by_hugging_face(calls[-1])[:2, 11].tolist())
            early = {"max_new_tokens": 12, "min_new_tokens": 3, "pad_token_id": 1, "eos_token_id": some}
            beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "pad_token_id": 1}
            calls += [asked(name, **early), asked(name, **beams, eos_token_id=some[:1])]
    return calls


def test_every_family_writes_what_hugging_face_writes() -> None:
    # How a text ends is nothing that families have a say in, so a few show it.
    compare(calls_of(tuple(MODELS), ends=False), LAYOUTS[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_family_does_whatever_ends_its_texts(layout: Layout) -> None:
    compare(calls_of(tuple(MODELS)), layout)


@pytest.mark.parametrize("layout", on_gpus(Layout(), *LAYOUTS[:2], Layout(dp=2)))
def test_gpus_write_what_hugging_face_writes_on_a_cpu(layout: Layout) -> None:
    compare(calls_of(tuple(MODELS)) + calls_of_every_t5(), layout, accelerator="gpu")


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[0],
        Layout(pp=2, vpp=2, num_microbatches=2),
        Layout(dp=3),
        pytest.param(Layout(cp=2, tp=2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_each_kind_of_positions_does_whatever_ends_its_texts(layout: Layout) -> None:
    compare(calls_of(FEW), layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, ep=2),
        pytest.param(Layout(tp=2, pp=2, ep=2, sequence_parallel=True), marks=pytest.mark.exhaustive),
        pytest.param(Layout(tp=2, dp=2, ep=4, sequence_parallel=True), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_ranks_that_share_experts_write_together(layout: Layout) -> None:
    # Of six experts four ranks cannot have equal shares.
    compare(calls_of(("mixtral", "qwen2_moe", "qwen3_moe")[: 1 if layout.ep == 4 else 3]), layout)


def test_more_ranks_than_key_value_heads() -> None:
    compare([asked(name, max_new_tokens=8, **NO_END) for name in ("gpt_bigcode", "falcon_40b")], Layout(tp=4))


def test_the_models_that_are_tested_are_all_families_of_gpts() -> None:
    others = {"megatron-bert", "bert", "t5", "mt5"}
    assert {model_type for model_type, _ in MODELS.values()} >= set(known_families()) - others


def test_the_side_of_the_padding_and_the_other_rows_change_nothing() -> None:
    # Padding is nothing that is repeated.
    left, right, options = prompts("left"), prompts("right"), {"max_new_tokens": 8, "repetition_penalty": 1.2} | NO_END
    options["no_repeat_ngram_size"] = 2
    calls = []
    for name in ("gpt2", "mistral", "bloom"):
        calls += [asked(name, left, **options), asked(name, right, **options)]
        calls += [
            Call(model=name, input_ids=row[mask == 1][None], options=options) for row, mask in zip(*left, strict=True)
        ]
    answers = continued(calls, Layout(pp=2))
    for first in range(0, len(calls), 6):
        on_left, on_right, *alone = answers[first : first + 6]
        assert torch.equal(on_right[:, :7], right[0])
        assert torch.equal(on_left[:, 7:], on_right[:, 7:])
        assert torch.equal(on_left[:, 7:], torch.cat([row[:, -8:] for row in alone]))


def test_repetition_penalty_runs_lengths_stop_sequences_and_the_models_own_end() -> None:
    rows = prompts(lengths=(7, 7, 7))
    plain = asked("llama", rows, max_new_tokens=12, **NO_END)
    whole = by_hugging_face(plain)
    new = whole[0, 7:].tolist()
    # Lengths with the prompt; the end that is held back is likely early.
    lengths: dict[str, Any] = {"max_length": 17, "min_length": 13, "no_repeat_ngram_size": 2, "pad_token_id": 1}
    lengths["eos_token_id"] = (new[1], new[2])
    calls = [
        asked("llama", rows, max_new_tokens=12, repetition_penalty=1.7, **NO_END),
        asked("llama", rows, max_new_tokens=30),
        asked("llama", rows, **lengths),
        asked("llama", rows, **lengths, num_beams=3, num_return_sequences=3),
    ]
    compare(calls, Layout(tp=2))
    stop = tuple(new[3:5])
    end = next(n for n in range(2, 13) if tuple(new[n - 2 : n]) == stop)
    stopping = replace(plain, options={**plain.options, "stop_sequences": (stop,), "pad_token_id": 1})
    one = replace(stopping, input_ids=rows[0][:1], attention_mask=None)
    answers = continued([stopping, one], Layout(tp=2))
    assert answers[0].tolist() == [whole[0, : 7 + end].tolist() + [1] * (12 - end), *whole[1:].tolist()]
    assert answers[1].tolist() == whole[:1, : 7 + end].tolist()


def test_a_first_token_is_put_before_the_prompts_that_have_none() -> None:
    call = asked("gpt2", max_new_tokens=6, **NO_END)
    first = int(call.input_ids[0, 0])  # the first row has it
    (actual,) = continued([replace(call, options={**call.options, "bos_token_id": first})], Layout(dp=2))
    for row, mask, text in zip(*prompts(), actual, strict=True):
        prompt = row[mask == 1]
        if prompt[0] != first:
            prompt = torch.cat((torch.tensor([first]), prompt))
        expected = by_hugging_face(replace(call, input_ids=prompt[None], attention_mask=None))
        assert text[-expected.shape[1] :].tolist() == expected[0].tolist()


def test_there_may_be_fewer_prompts_than_copies_and_stages() -> None:
    call = asked("qwen2", prompts(lengths=(5,), width=5), max_new_tokens=5, num_beams=2, **NO_END)
    for layout in (Layout(dp=3), Layout(pp=4)):
        compare([call], layout)


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.exhaustive)])
def test_sixteen_bits_write_what_hugging_face_writes_in_them(precision: str) -> None:
    call = asked("llama", prompts(lengths=(7,)), max_new_tokens=6, **NO_END)
    model = copy.deepcopy(hugging_face("llama")).to(torch.bfloat16 if precision == "bf16-mixed" else torch.float16)
    expected = model.generate(call.input_ids, do_sample=False, max_new_tokens=6, eos_token_id=-1)
    (actual,) = continued([call], Layout(pp=2), precision=precision)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2)], ids=str)
def test_each_token_is_shown_once_and_nothing_of_rows_that_ended(layout: Layout) -> None:
    expected = by_hugging_face(asked("gpt2", max_new_tokens=12, **NO_END))[:, 7:]
    end = int(expected[0, 2])
    rows = [row[: row.index(end) + 1] if end in row else row for row in expected.tolist()]
    assert len({len(row) for row in rows}) > 1
    call = asked("gpt2", max_new_tokens=12, eos_token_id=end)
    for dp_rank, seen in run_with_models(_seen, layout, [call]):
        own = rows[dp_rank * len(rows) // layout.dp : (dp_rank + 1) * len(rows) // layout.dp]
        assert seen == [text + [-1] * (len(seen[0]) - len(text)) for text in own]


def _seen(directory: str, case: Case, calls: list[Call]) -> tuple[int, list[list[int]]]:
    from lightning_megatron.errors import ConfigError

    module, steps = set_up(directory, case, "gpt2"), list[torch.Tensor]()
    arguments: dict[str, Any] = {"attention_mask": calls[0].attention_mask, **calls[0].options}
    module.generate(calls[0].input_ids, on_tokens=steps.append, **arguments)
    # Asked for on one rank, refused on all.
    watched = steps.append if module.trainer.is_global_zero else None
    with pytest.raises(ConfigError, match="on_tokens shows texts while they grow, num_beams=2 finds them"):
        module.generate(calls[0].input_ids, on_tokens=watched, num_beams=2, **arguments)
    return module.megatron.topology.dp_rank, torch.stack(steps, dim=1).tolist()
