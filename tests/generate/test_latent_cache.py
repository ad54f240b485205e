"""Generation with latent attention: what is cached, and adapters of the projections that a single query absorbs."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.engine.ops.key_value_cache import KeyValueCache
from tests.families.parity import padded_sentences, pretrained_module, with_adapters
from tests.generate.models import NO_END, Call, hf_model, make_call, run_with_models, set_up
from tests.parity.training import TP2_SP, Case, Layout, trainer_of
from tests.ranks import run_ranks


def _shapes_of_buffers(
    directory: str,
    case: Case,
    calls: list[Call],
) -> list[tuple[int, ...]]:
    (call,) = calls
    shapes: list[tuple[int, ...]] = []
    allocate = KeyValueCache._new_buffer

    def record(cache: KeyValueCache, new: Tensor) -> Tensor:
        buffer = allocate(cache, new)
        shapes.append(tuple(buffer.shape))
        return buffer

    KeyValueCache._new_buffer = record  # type: ignore[method-assign, assignment]
    set_up(directory, case, call.model).generate(
        call.input_ids, call.attention_mask, **call.options
    )
    return shapes


def test_a_token_is_cached_as_its_latent_and_its_rotated_key() -> None:
    call = make_call("deepseek_v3", max_new_tokens=6, **NO_END)
    rows, prompt = call.input_ids.shape
    slots = -(-(prompt + 5) // 8) * 8
    latent, rotated = 20, 8
    for shapes in run_with_models(_shapes_of_buffers, TP2_SP, [call]):
        assert shapes == [(rows, 1, slots, latent + rotated)] * 4


def _generate_with_adapters(directory: str, case: Case, call: Call) -> Tensor:
    module = pretrained_module(f"{directory}/source", lora=f"{directory}/adapter")
    loader: DataLoader[Any] = DataLoader(padded_sentences(), batch_size=4)  # type: ignore[arg-type]
    trainer_of(case).validate(module, loader, verbose=False)
    tokens: Tensor = module.generate(
        call.input_ids,
        call.attention_mask,
        **call.options,
    )
    return tokens


def test_generation_with_adapters_equals_peft(tmp_path: Path) -> None:
    call = make_call("deepseek_v3", max_new_tokens=8, **NO_END)
    plain = hf_model("deepseek_v3")
    plain.save_pretrained(tmp_path / "source")
    adapted = with_adapters(copy.deepcopy(plain), tmp_path)
    options = {"max_new_tokens": 8, "eos_token_id": -1, "pad_token_id": 0, "do_sample": False}
    expected = adapted.generate(call.input_ids, attention_mask=call.attention_mask, **options)
    unadapted = plain.generate(call.input_ids, attention_mask=call.attention_mask, **options)
    assert not torch.equal(expected, unadapted)
    layout = Layout(tp=2, sequence_parallel=True)
    case = Case(layout=layout, steps=1)
    for tokens in run_ranks(_generate_with_adapters, 2, str(tmp_path), case, call):
        assert tokens.tolist() == expected.tolist()
