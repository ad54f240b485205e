"""T5 and mT5 write what Hugging Face's write, wherever the pipeline is cut, and the encoder reads only once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.generate.decode import distribution_processors, drawn, uniform_numbers
from lightning_megatron.generate.options import GenerationOptions
from tests.generate.models import ENCODER_DECODERS, Call, continued, hugging_face, prompts, run_with_models, set_up
from tests.parity.training import Case, Layout

START = 2


def _cut(*layers: int) -> tuple[tuple[str, Any], ...]:
    return (("pipeline_model_parallel_layout", layers),)


LAYOUTS = (
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, num_microbatches=2, recompute="full"),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
)
CUTS = (
    Layout(pp=2, num_microbatches=2, transformer_config_overrides=_cut(2, 5)),
    Layout(pp=2, num_microbatches=2, transformer_config_overrides=_cut(7, 0)),
    Layout(pp=2, vpp=2, num_microbatches=2, transformer_config_overrides=_cut(0, 4, 2, 1)),
    Layout(dp=3),
)


@functools.cache
def _calls_and_answers() -> list[tuple[Call, torch.Tensor]]:
    """Each model six times: rows that never end or of which some end early, beams, what its decoder is to continue."""
    pairs = []
    for name, side in zip(ENCODER_DECODERS, ("right", "left", "right"), strict=True):
        ids, mask = prompts(side)
        # Without a cache: transformers 5.23 makes one of as many layers as the encoder has, and the decoder has more.
        common: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "use_cache": False}
        model = functools.partial(hugging_face(name).generate, ids, **common)
        whole = model(max_new_tokens=12, eos_token_id=-1, pad_token_id=0)
        ends = [int(token) for token in whole[:2, 5]]
        ended: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 3, "pad_token_id": 1}
        beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "pad_token_id": 1}
        penalized: dict[str, Any] = {"repetition_penalty": 1.7, "max_new_tokens": 8}
        # What the decoder continues: rows that lack the start token, and rows with padding.
        begun: dict[str, Any] = {"decoder_input_ids": ids[:, :2] + 1, "max_length": 9, "no_repeat_ngram_size": 2}
        ragged: dict[str, Any] = {
            "decoder_input_ids": torch.tensor([[2, 5, 9], [2, 2, 7], [2, 2, 2], [2, 6, 6]]),
            "decoder_attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1]]),
            **{"max_new_tokens": 6, "num_beams": 2, "min_length": 6, "pad_token_id": 1},
        }
        few, one = ({"max_new_tokens": 12}, []), (ragged, ends[:1])
        for options, eos in (few, (ended, ends), (beams, ends[:1]), (penalized, []), (begun, []), one):
            call = Call(model=name, input_ids=ids, attention_mask=mask, options={**options, "eos_token_id": tuple(eos)})
            pairs.append((call, model(**options, eos_token_id=eos or -1)))
    return pairs


@pytest.mark.parametrize(
    "layout", [LAYOUTS[1], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in LAYOUTS[2:])], ids=str
)
def test_every_model_writes_what_hugging_face_writes(layout: Layout) -> None:
    _compare(_calls_and_answers(), layout)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.exhaustive] * (i % 2), id=str(x)) for i, x in enumerate(CUTS)],
)
def test_every_cut_does(layout: Layout) -> None:
    _compare([pair for pair in _calls_and_answers() if pair[0].model == "t5_1_1"], layout)


def _compare(pairs: list[tuple[Call, torch.Tensor]], layout: Layout) -> None:
    calls, expected = zip(*pairs, strict=True)
    for call, actual, hf in zip(calls, continued(list(calls), layout), expected, strict=True):
        assert actual.tolist() == hf.tolist(), (call.model, call.options)
        assert set(actual[:, 0].tolist()) == {START}


def test_stages_send_sixteen_bits() -> None:
    # One row, so that stages multiply the matrices that one process multiplies.
    ids, mask = prompts(lengths=(7,))
    call = Call(model="mt5", input_ids=ids, attention_mask=mask, options={"max_new_tokens": 8, "eos_token_id": ()})
    (alone,), (sent,) = (continued([call], layout, precision="bf16-mixed") for layout in (Layout(), Layout(pp=2)))
    assert alone.tolist() == sent.tolist()
    assert alone.shape == (1, 9)


def test_tokens_are_drawn_from_hugging_faces_logits() -> None:
    ids, mask = prompts()
    ways: tuple[dict[str, Any], ...] = ({"top_p": 0.9, "top_p_decay": 0.9}, {"top_k": 20, "temperature": 0.8})
    options = [GenerationOptions(**way, max_new_tokens=8, eos_token_id=(), seed=5) for way in ways]
    calls = [Call(model="mt5", input_ids=ids, attention_mask=mask, options=vars(o)) for o in options]
    for call, chosen, actual in zip(calls, options, continued(calls, Layout(tp=2, pp=2)), strict=True):
        assert actual.tolist() == _drawn_by_hand(call, chosen).tolist()


def _drawn_by_hand(call: Call, options: GenerationOptions) -> torch.Tensor:
    uniform = uniform_numbers(options.seed, options.max_new_tokens, len(call.input_ids))
    text = torch.full((len(call.input_ids), 1), START)
    for step in range(options.max_new_tokens):
        logits = _logits_by_hand(call, text)[:, -1]
        for processor in distribution_processors(options, 1):
            logits = processor(text, logits)
        text = torch.cat((text, drawn(logits, uniform[step])[:, None]), dim=-1)
    return text


def _logits_by_hand(call: Call, decoder_input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model = hugging_face(call.model)
        logits: torch.Tensor = model(
            call.input_ids, attention_mask=call.attention_mask, decoder_input_ids=decoder_input_ids
        ).logits
    return logits


def test_the_encoder_reads_once_and_what_cannot_be_written_is_refused() -> None:
    ids, mask = prompts(lengths=(7, 3))
    (found,) = run_with_models(_read_and_refused, Layout(), [Call(model="t5", input_ids=ids, attention_mask=mask)])
    reads, refusals = found
    assert reads == {"encoder": [7], "cross": [7, 0, 0, 0], "decoder": [1, 1, 1, 1]}
    for refusal, says in zip(
        refusals,
        (
            "bos_token_id=3 stands before texts that are continued, and a t5 starts its own with",
            "decoder_input_ids have 1 rows and input_ids 2",
            "the prompts [1] are empty (decoder_input_ids have padding only)",
            "decoder_attention_mask: expected a tensor [2, 1], as decoder_input_ids have it, got torch.float32 [2, 2]",
            "decoder_attention_mask has no decoder_input_ids",
            "logits of t5 need decoder_input_ids",
            "decoder_input_ids have 1 rows and input_ids 2",
            "decoder_input_ids has the token 83",
            "input_ids has the token 83",
        ),
        strict=True,
    ):
        assert says in refusal


def _read_and_refused(directory: str, case: Case, calls: list[Call]) -> tuple[dict[str, list[int]], list[str]]:
    from lightning_megatron.errors import ConfigError

    module, call = set_up(directory, case, "t5"), calls[0]
    (chunk,) = (unwrap(chunk) for chunk in module.model_chunks)
    reads: dict[str, list[int]] = {}
    for name, part in (
        ("encoder", chunk.encoder),
        ("cross", chunk.decoder.layers[0].cross_attention.linear_kv),
        ("decoder", chunk.decoder),
    ):
        lengths = reads[name] = []
        part.register_forward_pre_hook(lambda _, inputs, lengths=lengths: lengths.append(len(inputs[0])))
    module.generate(call.input_ids, call.attention_mask, max_new_tokens=4, eos_token_id=())
    start = torch.tensor([[0], [2]])
    refused: list[Callable[[], Any]] = [
        lambda: module.generate(call.input_ids, bos_token_id=3),
        lambda: module.generate(call.input_ids, decoder_input_ids=call.input_ids[:1]),
        lambda: module.generate(call.input_ids, decoder_input_ids=start, decoder_attention_mask=1 - start // 2),
        lambda: module.generate(call.input_ids, decoder_input_ids=start, decoder_attention_mask=torch.ones(2, 2)),
        lambda: module.generate(call.input_ids, decoder_attention_mask=start),
        lambda: module.logits(call.input_ids),
        lambda: module.logits(call.input_ids, None, call.input_ids[:1]),
        lambda: module.logits(call.input_ids, None, torch.full((2, 1), 83)),
        lambda: module.generate(torch.full((1, 1), 83)),
    ]
    refusals = []
    for ask in refused:
        with pytest.raises(ConfigError) as error:
            ask()
        refusals.append(str(error.value))
    return {name: list(lengths) for name, lengths in reads.items()}, refusals
