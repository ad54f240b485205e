"""Generated sequences equal those of transformers: every family, layout, way to end, and beam search."""

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
    compare,
    generate,
    hf_model,
    hf_output,
    layouts_on_gpus,
    make_call,
    prompts,
    run_with_models,
    set_up,
)
from tests.generate.test_encoder_decoders import calls_of_every_t5
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.training import DP2, INTERLEAVED, TP2, TP2_DP2, TP2_SP, Case, Layout
from tests.tokenizers import byte_level_tokenizer

LAYOUTS = (
    TP2_SP,
    Layout(pp=2, recompute="full"),
    Layout(
        tp=2,
        pp=2,
        sequence_parallel=True,
        num_microbatches=2,
        recompute="selective",
    ),
)
FEW = ("gpt2", "llama_dynamic", "mistral", "bloom")
"""One model for each kind of positional encoding."""
KINDS = (
    *FEW,
    "gpt_bigcode",
    "falcon_40b",
    "falcon_alibi",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
    "opt",
    "glm4",
    "ministral3",
    "qwen3_5_text",
    "qwen3_next",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "latent_dense",
    "nemotron",
    "apertus",
)
"""One model for each kind of layer that a cache or a position passes through."""
EVERY = tuple(MODELS)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
CASES: tuple[tuple[Layout, tuple[str, ...], bool], ...] = (
    # How sequences end does not depend on the family, so a few models suffice.
    (LAYOUTS[0], KINDS, False),
    (LAYOUTS[0], FEW, True),
    (INTERLEAVED, FEW, True),
    (Layout(dp=3), FEW, True),
    (Layout(dp=2, ep=2), MIXTURES, True),
    (Layout(tp=4), ("gpt_bigcode", "falcon_40b"), False),  # more ranks than key-value heads
)
"""Layout, models, and whether to also test early ends and beams."""
RARER_CASES = (
    (LAYOUTS[0], EVERY, False),
    *((layout, EVERY, True) for layout in LAYOUTS),
    (Layout(cp=2, tp=2), FEW, True),
    (
        Layout(tp=2, pp=2, ep=2, sequence_parallel=True),
        MIXTURES,
        True,
    ),
    (
        Layout(tp=2, dp=2, ep=4, sequence_parallel=True),
        MIXTURES[:1],
        True,
    ),  # four ranks cannot share six experts
)


@functools.cache
def calls_of(
    names: tuple[str, ...],
    *,
    ends: bool = True,
) -> list[Call]:
    """Each model without end-of-sequence and, with ``ends``, with early ends of some rows and with beam search."""
    calls = []
    for name in names:
        calls.append(make_call(name, max_new_tokens=12 if ends else 8, **NO_END))
        if ends:
            end_tokens = tuple(hf_output(calls[-1])[:2, 11].tolist())
            early: dict[str, Any] = {
                "max_new_tokens": 12,
                "min_new_tokens": 3,
                "pad_token_id": 1,
                "eos_token_id": end_tokens,
            }
            beams: dict[str, Any] = {
                "num_beams": 3,
                "num_return_sequences": 2,
                "max_new_tokens": 6,
                "pad_token_id": 1,
            }
            calls += [
                make_call(name, **early),
                make_call(name, **beams, eos_token_id=end_tokens[:1]),
            ]
    return calls


@pytest.mark.parametrize(
    ("layout", "models", "ends"),
    [
        *CASES,
        *(exhaustive(*case) for case in RARER_CASES),
    ],
    ids=lambda part: str(part) if isinstance(part, Layout | bool) else f"{len(part)} models",
)
def test_sequences_equal_hugging_face(
    layout: Layout,
    models: tuple[str, ...],
    ends: bool,
) -> None:
    compare(calls_of(models, ends=ends), layout)


@pytest.mark.parametrize(
    "layout",
    layouts_on_gpus(Layout(), *LAYOUTS[:2], DP2),
)
def test_sequences_on_gpus_equal_hugging_face_on_cpu(layout: Layout) -> None:
    compare(calls_of(EVERY) + calls_of_every_t5(), layout, accelerator="gpu")


def test_models_cover_all_gpt_families() -> None:
    others = {"megatron-bert", "bert", "t5", "mt5"}
    assert {model_type for model_type, _ in MODELS.values()} >= set(known_families()) - others


def test_padding_side_is_irrelevant_and_missing_bos_is_prepended() -> None:
    first = int(prompts()[0][0, 0])
    # Padding tokens do not count as repetition.
    options = ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}, {"bos_token_id": first})
    calls = [
        make_call(name, prompts(side), max_new_tokens=8, **o, **NO_END)
        for name, o in (
            ("gpt2", options[0]),
            ("mistral", options[0]),
            ("bloom", options[0]),
            ("gpt2", options[1]),
        )
        for side in ("left", "right")
    ]
    for call, actual in zip(calls, generate(calls, Layout(pp=2)), strict=True):
        alone = {key: value for key, value in call.options.items() if key != "bos_token_id"}
        for row, mask, sequence in zip(*prompts(), actual, strict=True):
            prompt = row[mask == 1]
            if "bos_token_id" in call.options and prompt[0] != first:
                prompt = torch.cat((torch.tensor([first]), prompt))
            expected = hf_output(
                Call(
                    model=call.model,
                    input_ids=prompt[None],
                    options=alone,
                )
            )
            assert sequence[-8:].tolist() == expected[0, -8:].tolist(), call.options


def test_penalties_length_limits_stop_sequences_and_default_eos() -> None:
    rows = prompts(lengths=(7, 7, 7))
    plain = make_call("llama", rows, max_new_tokens=12, **NO_END)
    complete = hf_output(plain)
    new = complete[0, 7:].tolist()
    # Lengths include the prompt; without min_length the end tokens would likely come early.
    lengths: dict[str, Any] = {
        "max_length": 17,
        "min_length": 13,
        "no_repeat_ngram_size": 2,
        "pad_token_id": 1,
    }
    lengths["eos_token_id"] = (new[1], new[2])
    calls = [
        make_call("llama", rows, max_new_tokens=12, repetition_penalty=1.7, **NO_END),
        make_call("llama", rows, max_new_tokens=30),
        make_call("llama", rows, **lengths),
        make_call("llama", rows, **lengths, num_beams=3, num_return_sequences=3),
    ]
    compare(calls, TP2)
    stop = tuple(new[3:5])
    end = next(n for n in range(2, 13) if tuple(new[n - 2 : n]) == stop)
    stopping = replace(
        plain,
        options={
            **plain.options,
            "stop_sequences": (stop,),
            "pad_token_id": 1,
        },
    )
    one = replace(
        stopping,
        input_ids=rows[0][:1],
        attention_mask=None,
    )
    sequences = generate([stopping, one], TP2)
    assert sequences[0].tolist() == [
        complete[0, : 7 + end].tolist() + [1] * (12 - end),
        *complete[1:].tolist(),
    ]
    assert sequences[1].tolist() == complete[:1, : 7 + end].tolist()


def test_fewer_prompts_than_replicas_or_stages() -> None:
    call = make_call(
        "qwen2",
        prompts(lengths=(5,), width=5),
        max_new_tokens=5,
        num_beams=2,
        **NO_END,
    )
    for layout in (Layout(dp=3), Layout(pp=4)):
        compare([call], layout)


def test_bf16_sequences_equal_hugging_face() -> None:
    call = make_call(
        "llama",
        prompts(lengths=(7,)),
        max_new_tokens=6,
        **NO_END,
    )
    model = copy.deepcopy(hf_model("llama")).to(torch.bfloat16)
    expected = model.generate(
        call.input_ids,
        do_sample=False,
        max_new_tokens=6,
        eos_token_id=-1,
    )
    (actual,) = generate(
        [call],
        Layout(pp=2),
        precision="bf16-mixed",
    )
    assert actual.tolist() == expected.tolist()


def test_on_tokens_streams_each_token_once_until_rows_end() -> None:
    layout = Layout(pp=2, dp=2)
    expected = hf_output(make_call("gpt2", max_new_tokens=12, **NO_END))[:, 7:]
    end = int(expected[0, 2])
    rows = [row[: row.index(end) + 1] if end in row else row for row in expected.tolist()]
    assert len({len(row) for row in rows}) > 1
    call = make_call("gpt2", max_new_tokens=12, eos_token_id=end)
    for dp_rank, streamed in run_with_models(_stream, layout, [call]):
        own = rows[dp_rank * len(rows) // layout.dp : (dp_rank + 1) * len(rows) // layout.dp]
        assert streamed == [row + [-1] * (len(streamed[0]) - len(row)) for row in own]


def _stream(
    directory: str,
    case: Case,
    calls: list[Call],
) -> tuple[int, list[list[int]]]:
    from lightning_megatron.errors import ConfigError

    module = set_up(directory, case, "gpt2")
    steps = list[torch.Tensor]()
    arguments: dict[str, Any] = {
        "attention_mask": calls[0].attention_mask,
        **calls[0].options,
    }
    module.generate(calls[0].input_ids, on_tokens=steps.append, **arguments)
    # Passed on one rank, refused on all.
    on_tokens = steps.append if module.trainer.is_global_zero else None
    with pytest.raises(ConfigError, match="on_tokens streams tokens, num_beams=2 finds them"):
        module.generate(
            calls[0].input_ids,
            on_tokens=on_tokens,
            num_beams=2,
            **arguments,
        )
    return module.megatron.topology.dp_rank, torch.stack(steps, dim=1).tolist()


# ---- beams ----------------------------------------------------------------------------------------------------------

SEARCHES: tuple[dict[str, Any], ...] = (
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": -1.0, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 20, "length_penalty": 1.5, "num_return_sequences": 2},
    {"num_beams": 3, "repetition_penalty": 1.4, "min_new_tokens": 6, "num_return_sequences": 3},
)
_ATOL = 1e-4
"""For fp32 sums over the vocabulary and at most six tokens in another order."""


def test_beam_searches_equal_hugging_face() -> None:
    rows = prompts(lengths=(7, 3, 5))
    # End tokens that are likely at some positions, so that some beams end and some do not.
    likely = hf_output(make_call("llama", rows, max_new_tokens=12, **NO_END))
    ends = (
        int(likely[0, 9]),
        int(likely[1, 12]),
        int(likely[2, 10]),
    )
    common = {"max_new_tokens": 11, "pad_token_id": 1}
    calls = [
        make_call("llama", rows, **o, **common, eos_token_id=eos)
        for o in SEARCHES
        for eos in (ends[:1], ends)
    ]
    assert len({hf_output(call).shape[1] for call in calls}) > 1, (
        "no search ended earlier than another"
    )
    compare(calls, Layout(pp=2))


def test_scores_equal_hugging_face() -> None:
    rows = prompts(lengths=(7, 4, 6))
    common: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 1}
    end = int(hf_output(make_call("llama", rows, **common, **NO_END))[0, 9])
    options = {**common, "eos_token_id": (end,)}
    beams = {"num_beams": 3, "num_return_sequences": 2}
    outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    one: Any = hf_output(make_call("llama", rows, **options, **outputs))
    several: Any = hf_output(
        make_call(
            "llama",
            rows,
            **options,
            **beams,
            **outputs,
        )
    )
    beam_scores = hf_model("llama").compute_transition_scores(
        several.sequences, several.scores, several.beam_indices
    )
    assert beam_scores[:, -1].eq(0.0).any(), "no sequence ended earlier than another"
    new = one.sequences[:, 7:]
    ended = ((new == end).cumsum(-1) - (new == end).long()) > 0
    scores = (
        torch.stack(one.logits, dim=1)
        .log_softmax(-1)
        .gather(-1, new[..., None])[..., 0]
        .masked_fill(ended, 0)
    )
    expected = (
        (one.sequences, scores, scores.sum(-1)),
        (several.sequences, beam_scores, several.sequences_scores),
    )
    calls = [
        make_call("llama", rows, **options),
        make_call("llama", rows, **options, **beams),
    ]
    for outputs_of_rank in run_with_models(_generate_with_scores, TP2_DP2, calls):
        for actual, (sequences, log_probabilities, scores) in zip(
            outputs_of_rank, expected, strict=True
        ):
            assert torch.equal(actual.sequences, sequences)
            torch.testing.assert_close(
                actual.log_probabilities, log_probabilities, rtol=0.0, atol=_ATOL
            )
            torch.testing.assert_close(actual.scores, scores, rtol=0.0, atol=_ATOL)


def _generate_with_scores(
    directory: str,
    case: Case,
    calls: list[Call],
) -> list[Any]:
    module = set_up(directory, case, "llama")
    return [module.generate_with_scores(c.input_ids, c.attention_mask, **c.options) for c in calls]


# ---- stop strings ---------------------------------------------------------------------------------------------------


def _tokenizer(pieces: dict[int, bytes]) -> Any:
    """Decodes tokens to ``pieces``, and all other tokens to text without a stop string."""
    return byte_level_tokenizer(
        {token: pieces.get(token, f"<{token}>".encode()) for token in range(VOCAB_SIZE)}
    )


def test_stop_strings_end_sequences_like_hugging_face() -> None:
    ids, mask = prompts(lengths=(7, 4, 6, 5))
    plain: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 1} | NO_END
    new = hf_output(make_call("mistral", (ids, mask), **plain))[:, 7:].tolist()
    # Stop strings: one character of two tokens; inside a token; half in the prompt; over three tokens, ending in one.
    pieces = {
        new[0][4]: b"x\xc3",
        new[0][5]: b"\xa9",
        new[1][3]: b"abcd",
        int(ids[2, -1]): b"st",
        new[2][0]: b"opera",
    }
    pieces |= {
        new[3][1]: b" 0.",
        new[3][2]: b"1.",
        new[3][3]: b"2.3",
    }
    assert len(pieces) == 8
    plain |= {
        "stop_strings": ("é", "bc", "stop", "0.1.2"),
        "tokenizer": _tokenizer(pieces),
    }
    ending = {**plain, "eos_token_id": (new[0][2],)}
    beams = {**plain, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    # Also with an end-of-sequence token, and with a minimum length, which only delays the latter.
    calls = [
        make_call("mistral", (ids, mask), **o)
        for o in (plain, ending, {**ending, "min_new_tokens": 5}, beams)
    ]
    alone = hf_output(calls[0])[:, 7:].tolist()
    assert [row.index(1) if 1 in row else len(row) for row in alone] == [6, 4, 1, 4]
    assert hf_output(calls[1])[0, 7:].tolist().index(1) == 3
    assert set(hf_output(calls[2])[2, 8:].tolist()) == {1}
    assert hf_output(calls[3])[:, -1].eq(1).any()
    compare([*calls, _stopped_t5()], Layout(pp=2))
    # Without the prompt's half the third row goes on.
    plain["stop_strings_from_prompt"] = False
    (found,) = generate(
        [
            make_call(
                "mistral",
                (ids, mask),
                **plain,
            )
        ],
        Layout(pp=2),
    )
    expected = [row + [1] * (12 - len(row)) for row in (*alone[:2], new[2], alone[3])]
    assert found[:, 7:].tolist() == expected


def _stopped_t5() -> Call:
    rows = prompts("right", lengths=(7, 4))
    begun = {
        "decoder_input_ids": torch.tensor([[2, 5], [2, 6]]),
        "max_new_tokens": 8,
        "pad_token_id": 3,
    } | NO_END
    plain = hf_output(make_call("t5_1_1", rows, **begun)).tolist()
    tokenizer = _tokenizer(
        {
            5: b"sto",
            plain[0][2]: b"p",
            plain[1][4]: b"stop",
        }
    )
    call = make_call("t5_1_1", rows, **begun, stop_strings="stop", tokenizer=tokenizer)
    assert hf_output(call)[:, 3:].tolist() == [[3, 3], plain[1][3:5]]
    return call
