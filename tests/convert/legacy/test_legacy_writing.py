"""A written legacy checkpoint is what Megatron-LM's layout says, number by number: compared with cuts made by hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron.convert.convert import ConvertOptions, convert
from tests.convert.directories import tiny_bert, tiny_gpt2, tiny_llama
from tests.convert.legacy.written import flat, load, options
from tests.families.parity import VOCAB_SIZE, tiny_model

NAMES_OF_A_LAYER = (
    *("input_layernorm.weight", "input_layernorm.bias"),
    *("self_attention.query_key_value.weight", "self_attention.query_key_value.bias"),
    *("self_attention.dense.weight", "self_attention.dense.bias"),
    *("post_attention_layernorm.weight", "post_attention_layernorm.bias"),
    *("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"),
)


@functools.cache
def _gpt2() -> Any:
    return tiny_gpt2()


@functools.cache
def _llama() -> Any:
    return tiny_llama()


@functools.cache
def _bert() -> Any:
    return tiny_bert("PreTraining")


@functools.cache
def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, num_decoder_layers=3
    )
    return tiny_model(T5ForConditionalGeneration, config)


def _write(model: Any, folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Write ``model`` as ``folder / "legacy"``; returns its weights in Hugging Face's names."""
    model.save_pretrained(folder / "hf")
    convert(options(folder / "hf", folder / "legacy", **fields))
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def _rank(folder: Path, name: str, chunk: str = "model") -> dict[str, torch.Tensor]:
    return flat(load(folder / "legacy" / "release" / name / "model_optim_rng.pt")[chunk])


def _equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and actual.is_contiguous() and torch.equal(actual, expected)


@pytest.mark.parametrize(("tp", "stage"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gpt2_at_tp2_pp2_is_cut_as_by_hand(tmp_path: Path, tp: int, stage: int) -> None:
    hf = _write(_gpt2(), tmp_path, tp=2, pp=2)
    assert (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").read_text() == "release"

    ours = _rank(tmp_path, f"mp_rank_{tp:02d}_{stage:03d}")

    def layer(name: str) -> torch.Tensor:
        return ours[f"language_model.encoder.layers.0.{name}"]

    theirs = {name.removeprefix(f"transformer.h.{stage}."): tensor for name, tensor in hf.items()}
    heads, half = slice(2 * tp, 2 * tp + 2), slice(16 * tp, 16 * tp + 16)
    # Hugging Face: [h, 3 x 4 heads x 8]; Megatron: two of the heads, of each its query, key and value.
    qkv = theirs["attn.c_attn.weight"].t().view(3, 4, 8, 32)[:, heads].transpose(0, 1).reshape(48, 32)
    assert _equal(layer("self_attention.query_key_value.weight"), qkv)
    bias = theirs["attn.c_attn.bias"].view(3, 4, 8)[:, heads].transpose(0, 1).reshape(48)
    assert _equal(layer("self_attention.query_key_value.bias"), bias)
    assert _equal(layer("self_attention.dense.weight"), theirs["attn.c_proj.weight"].t()[:, half])
    assert _equal(layer("self_attention.dense.bias"), theirs["attn.c_proj.bias"])
    ffn = slice(64 * tp, 64 * tp + 64)
    assert _equal(layer("mlp.dense_h_to_4h.weight"), theirs["mlp.c_fc.weight"].t()[ffn])
    assert _equal(layer("mlp.dense_h_to_4h.bias"), theirs["mlp.c_fc.bias"][ffn])
    assert _equal(layer("mlp.dense_4h_to_h.weight"), theirs["mlp.c_proj.weight"].t()[:, ffn])
    for ours_, theirs_ in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
        assert all(_equal(layer(f"{ours_}.{kind}"), theirs[f"{theirs_}.{kind}"]) for kind in ("weight", "bias"))

    rows = torch.zeros(96, 32)  # 83 tokens, a multiple of 8 x 2
    rows[:VOCAB_SIZE] = hf["transformer.wte.weight"]
    table = rows[48 * tp : 48 * tp + 48]
    layers = [f"language_model.encoder.layers.0.{name}" for name in NAMES_OF_A_LAYER]
    if stage == 0:
        assert _equal(ours["language_model.embedding.word_embeddings.weight"], table)
        assert _equal(ours["language_model.embedding.position_embeddings.weight"], hf["transformer.wpe.weight"])
        assert {*layers} < {*ours}
    else:
        assert _equal(ours["word_embeddings_for_head.weight"], table)
        # Readers take layers from the front of a dictionary, and a weight before its bias.
        encoder = [name for name in ours if ".encoder." in name]
        assert {*encoder[:-2]} == {*layers}
        assert encoder[-2:] == [f"language_model.encoder.final_layernorm.{kind}" for kind in ("weight", "bias")]


def test_the_bias_of_berts_head_is_cut_and_padded_with_the_vocabulary(tmp_path: Path) -> None:
    hf = _write(_bert(), tmp_path, tp=2, pp=2)
    rows = torch.zeros(96)
    rows[:VOCAB_SIZE] = hf["cls.predictions.bias"]
    for tp in range(2):
        last = _rank(tmp_path, f"mp_rank_{tp:02d}_001")
        assert _equal(last["lm_head.bias"], rows[48 * tp : 48 * tp + 48])
        assert _equal(last["lm_head.dense.weight"], hf["cls.predictions.transform.dense.weight"])
        assert _equal(last["language_model.pooler.dense.bias"], hf["bert.pooler.dense.bias"])
        assert "word_embeddings_for_head.weight" in last


@pytest.mark.parametrize("tp", [0, 1])
def test_llamas_gates_and_groups_are_cut_for_each_rank(tmp_path: Path, tp: int) -> None:
    hf = _write(_llama(), tmp_path, tp=2)
    ours = _rank(tmp_path, f"mp_rank_{tp:02d}")
    layer, theirs = "language_model.encoder.layers.3.", "model.layers.3."
    rows = slice(24 * tp, 24 * tp + 24)
    branches = [hf[f"{theirs}mlp.{name}_proj.weight"][rows] for name in ("gate", "up")]
    assert _equal(ours[layer + "mlp.dense_h_to_4h.weight"], torch.cat(branches))
    # Four heads and two groups of width 8: a rank has two queries, their key and their value.
    attention = f"{theirs}self_attn."
    queries = hf[attention + "q_proj.weight"][16 * tp : 16 * tp + 16]
    key_value = [hf[f"{attention}{name}_proj.weight"][8 * tp : 8 * tp + 8] for name in "kv"]
    assert _equal(ours[layer + "self_attention.query_key_value.weight"], torch.cat([queries, *key_value]))
    assert _equal(
        ours["language_model.output_layer.weight"][: 48 - 13 * tp], hf["lm_head.weight"][48 * tp : 48 * tp + 48]
    )
    assert not any("bias" in name or "position" in name or "for_head" in name for name in ours)


def test_interleaved_stages_hold_every_second_chunk(tmp_path: Path) -> None:
    hf = _write(_llama(), tmp_path, pp=2, vpp=2)
    names = "language_model.encoder.layers.0.input_layernorm.weight"
    for stage, chunk, layer in ((0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)):
        ours = _rank(tmp_path, f"mp_rank_00_{stage:03d}", f"model{chunk}")
        assert _equal(ours[names], hf[f"model.layers.{layer}.input_layernorm.weight"])
        assert ("language_model.embedding.word_embeddings.weight" in ours) == (layer == 0)
        assert ("language_model.output_layer.weight" in ours) == (layer == 3)
        assert not any("layers.1." in name for name in ours)
    state = load(tmp_path / "legacy/release/mp_rank_00_000/model_optim_rng.pt")
    assert "model" not in state
    assert state["args"].num_layers_per_virtual_pipeline_stage == 1
    assert state["args"].virtual_pipeline_model_parallel_size == 2


def test_a_t5_is_cut_between_encoder_and_decoder(tmp_path: Path) -> None:
    hf = _write(_t5(), tmp_path, pp=3)
    stages = [_rank(tmp_path, f"mp_rank_00_{stage:03d}") for stage in range(3)]
    args = load(tmp_path / "legacy/release/mp_rank_00_000/model_optim_rng.pt")["args"]
    assert args.pipeline_model_parallel_split_rank == 1
    table = "language_model.embedding.word_embeddings.weight"
    assert [table in stage for stage in stages] == [True, True, False]
    assert ["word_embeddings_for_head.weight" in stage for stage in stages] == [False, False, True]
    decoder = "language_model.decoder.layers."
    counts = [len({n.split(".")[3] for n in stage if n.startswith(decoder)}) for stage in stages]
    assert counts == [0, 2, 1]
    block = "decoder.block.2.layer.1."
    keys, values = (hf[f"{block}EncDecAttention.{name}.weight"].view(4, 8, 32) for name in "kv")
    expected = torch.stack([keys, values], dim=1).reshape(64, 32)
    assert _equal(stages[2][decoder + "0.inter_attention.key_value.weight"], expected)
    assert _equal(stages[2][decoder + "0.inter_attention.query.weight"], hf[block + "EncDecAttention.q.weight"])
    assert _equal(stages[2][decoder + "0.post_attention_layernorm.weight"], hf[block + "layer_norm.weight"])
    norm = hf["decoder.block.2.layer.2.layer_norm.weight"]
    assert _equal(stages[2][decoder + "0.post_inter_attention_layernorm.weight"], norm)
    assert "language_model.encoder.final_layernorm.weight" in stages[0]
    assert "language_model.decoder.final_layernorm.weight" in stages[2]


# ---- what a checkpoint says of itself -------------------------------------------------------------------------------


def test_arguments_describe_the_model_and_the_layout(tmp_path: Path) -> None:
    _write(_llama(), tmp_path, tp=2, pp=2, dtype="bf16")
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


@pytest.mark.parametrize(
    ("activation", "is_fused", "is_openai"),
    [("gelu", False, False), ("gelu_new", False, True), ("gelu_fast", True, False)],
)
def test_activations_are_said_as_transformers_scripts_read_them(
    tmp_path: Path, activation: str, is_fused: bool, is_openai: bool
) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=83, n_layer=1, n_embd=8, n_head=1, n_positions=4, activation_function=activation)
    _write(tiny_model(AutoModelForCausalLM, config), tmp_path)
    args = load(tmp_path / "legacy/release/mp_rank_00/model_optim_rng.pt")["args"]
    assert (args.bias_gelu_fusion, args.openai_gelu) == (is_fused, is_openai)


def test_a_llama_comes_back_from_chunks_and_from_a_distributed_optimizer(tmp_path: Path) -> None:
    expected = _write(_llama(), tmp_path, pp=2, vpp=2, tp=2)
    for file in list((tmp_path / "legacy").rglob("model_optim_rng.pt")):  # as Megatron-LM of 2022 named them
        (own := file.parent.with_name(f"{file.parent.name}_000")).mkdir()
        (own / "optim.pt").touch()
        file.rename(file.with_name("model_rng.pt"))
    convert(ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "back", to="hf"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(_equal(found[name], tensor) for name, tensor in expected.items())
