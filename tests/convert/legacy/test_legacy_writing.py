"""A written legacy checkpoint is what Megatron-LM's layout says, number by number: compared with cuts made by hand."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron.convert.convert import ConvertOptions, convert
from tests.convert.directories import tiny, tiny_bert, tiny_gpt2, tiny_llama
from tests.convert.legacy.layouts import Layout, bert, even, gpt2, llama, write
from tests.convert.legacy.written import flat, load, options


@functools.cache
def _bert() -> Any:
    return tiny_bert("PreTraining")


def _write(model: Any, folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Write ``model`` as ``folder / "legacy"``; returns its weights in Hugging Face's names."""
    model.save_pretrained(folder / "hf")
    convert(options(folder / "hf", folder / "legacy", **fields))
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def _rank(folder: Path, name: str, chunk: str = "model") -> dict[str, torch.Tensor]:
    return flat(load(folder / "legacy" / "release" / name / "model_optim_rng.pt")[chunk])


WRITTEN: dict[str, tuple[Any, Any, Layout]] = {
    "gpt2 at tp2 pp2": (tiny_gpt2, gpt2, Layout(stages=even(2, 2), tp=2)),
    "bert at tp2 pp2": (_bert, bert, Layout(stages=even(2, 2), tp=2)),
    "llama at tp2": (tiny_llama, llama, Layout(stages=even(4), tp=2)),
    "llama at tp2 pp2 vpp2": (tiny_llama, llama, Layout(stages=(((0,), (2,)), ((1,), (3,))), tp=2)),
    "llama at pp3": (tiny_llama, llama, Layout(stages=(((0, 1),), ((2,),), ((3,),)))),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_every_rank_has_what_is_cut_by_hand(tmp_path: Path, case: str) -> None:
    model, built, layout = WRITTEN[case]
    # 83 tokens, and a multiple of 8 x tp.
    layout = replace(layout, padding=13 if layout.tp == 2 else 5, padding_is_zero=True)
    write(tmp_path / "by_hand", layout, built(model()))
    num_chunks = len(layout.stages[0])
    pipeline = {"pp": len(layout.stages), "vpp": num_chunks if num_chunks > 1 else None}
    _write(model(), tmp_path, tp=layout.tp, **pipeline)

    files = sorted((tmp_path / "by_hand").rglob("model_optim_rng.pt"))
    assert len(files) == layout.tp * len(layout.stages)
    for file in files:
        by_hand, ours = load(file), load(tmp_path / "legacy" / "release" / file.parent.name / file.name)
        for chunk in (key for key in by_hand.keys() | ours.keys() if key.startswith("model")):
            theirs, found = flat(by_hand[chunk]), flat(ours[chunk])
            assert found.keys() == theirs.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in theirs.items())
            assert all(tensor.is_contiguous() for tensor in found.values())
            # Readers take layers from the front of a dictionary, and a weight before its bias.
            inside = [name for name in found if ".encoder.layers." in name]
            assert [int(name.split(".")[3]) for name in inside] == sorted(int(name.split(".")[3]) for name in inside)
            assert all(not name.endswith("bias") or f"{name[:-4]}weight" in inside[:i] for i, name in enumerate(inside))
            assert not any("final_" in name for name in [n for n in found if ".encoder." in n][: len(inside)])
    assert (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_a_t5_is_cut_between_encoder_and_decoder(tmp_path: Path) -> None:
    _write(tiny("t5"), tmp_path, pp=3)
    stages = [_rank(tmp_path, f"mp_rank_00_{stage:03d}") for stage in range(3)]
    args = load(tmp_path / "legacy/release/mp_rank_00_000/model_optim_rng.pt")["args"]
    assert args.pipeline_model_parallel_split_rank == 1
    table = "language_model.embedding.word_embeddings.weight"
    assert [table in stage for stage in stages] == [True, True, False]
    assert ["word_embeddings_for_head.weight" in stage for stage in stages] == [False, False, True]
    decoder = "language_model.decoder.layers."
    assert [len({n.split(".")[3] for n in stage if n.startswith(decoder)}) for stage in stages] == [0, 2, 2]
    assert "language_model.encoder.final_layernorm.weight" in stages[0]
    assert "language_model.decoder.final_layernorm.weight" in stages[2]


# ---- what a checkpoint says of itself -------------------------------------------------------------------------------


def test_arguments_describe_the_model_and_the_layout(tmp_path: Path) -> None:
    _write(tiny_llama(), tmp_path, tp=2, pp=2, dtype="bf16")
    args = load(tmp_path / "legacy/release/mp_rank_01_001/model_optim_rng.pt")["args"]
    expected = {
        **{"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "kv_channels": 8},
        **{"group_query_attention": True, "num_query_groups": 2, "max_position_embeddings": 24, "seq_length": 24},
        **{"orig_vocab_size": 83, "padded_vocab_size": 96, "make_vocab_size_divisible_by": 8},
        **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "data_parallel_size": 1},
        **{"world_size": 4, "virtual_pipeline_model_parallel_size": None, "use_distributed_optimizer": False},
        **{"params_dtype": torch.bfloat16, "bf16": True, "fp16": False},
        **{"normalization": "RMSNorm", "swiglu": True, "bias_gelu_fusion": False, "openai_gelu": False},
        **{"add_bias_linear": False, "add_qkv_bias": False, "untie_embeddings_and_output_weights": True},
        **{"position_embedding_type": "rope", "rotary_base": 10000.0, "add_position_embedding": False},
        **{"iteration": 0, "consumed_train_samples": 0, "tokenizer_type": "HuggingFaceTokenizer"},
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert '"model_type": "llama"' in args.hugging_face_config
    assert '"LlamaForCausalLM"' in args.hugging_face_config
    tensors = _rank(tmp_path, "mp_rank_01_001")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_llama_comes_back_from_chunks_and_from_a_distributed_optimizer(tmp_path: Path) -> None:
    expected = _write(tiny_llama(), tmp_path, pp=2, vpp=2, tp=2)
    for file in list((tmp_path / "legacy").rglob("model_optim_rng.pt")):  # as Megatron-LM of 2022 named them
        (own := file.parent.with_name(f"{file.parent.name}_000")).mkdir()
        (own / "optim.pt").touch()
        file.rename(file.with_name("model_rng.pt"))
    convert(ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "back", to="hf"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
