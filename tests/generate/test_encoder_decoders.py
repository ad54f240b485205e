"""Do T5 and mT5 write what Hugging Face's write, wherever the pipeline is cut, and does the encoder read only once?"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.generate.models import ENCODER_DECODERS, Call, continued, hugging_face, prompts
from tests.parity.training import Layout

START = 2
NO_END: dict[str, Any] = {"eos_token_id": ()}


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
    """Each model thrice: rows that never end, rows of which some end early, and the best of several beams."""
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
        for options, eos in (({"max_new_tokens": 12}, []), (ended, ends), (beams, ends[:1]), (penalized, [])):
            call = Call(model=name, input_ids=ids, attention_mask=mask, options={**options, "eos_token_id": tuple(eos)})
            pairs.append((call, model(**options, eos_token_id=eos or -1)))
    return pairs


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_model_writes_what_hugging_face_writes(layout: Layout) -> None:
    _compare(_calls_and_answers(), layout)


@pytest.mark.parametrize("layout", CUTS, ids=str)
def test_every_cut_does(layout: Layout) -> None:
    _compare([pair for pair in _calls_and_answers() if pair[0].model == "t5_1_1"], layout)


def _compare(pairs: list[tuple[Call, torch.Tensor]], layout: Layout) -> None:
    calls, expected = zip(*pairs, strict=True)
    for call, actual, hf in zip(calls, continued(list(calls), layout), expected, strict=True):
        assert actual.tolist() == hf.tolist(), (call.model, call.options)
        assert set(actual[:, 0].tolist()) == {START}
