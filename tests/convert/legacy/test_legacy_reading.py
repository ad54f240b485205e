"""Every legacy checkpoint gives the weights that went into it, bit for bit."""

from __future__ import annotations

import functools
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.contents import find_source, open_source
from lightning_megatron.convert.convert import ConvertOptions, convert
from lightning_megatron.convert.megatron_arguments import described_by
from lightning_megatron.convert.registry import config_object, model_config, rules_of
from lightning_megatron.convert.shards import Key
from lightning_megatron.errors import CheckpointError
from tests.convert.directories import tiny_bert, tiny_llama
from tests.convert.legacy.layouts import (
    FIRST_RELEASES,
    LAST_RELEASES,
    MEGATRON_CORE,
    TRANSFORMER_ENGINE,
    Layout,
    bert,
    even,
    gpt2,
    llama,
    write,
)
from tests.convert.weights import Weights, assert_same_weights, weights_of
from tests.families.parity import tiny_model
from tests.families.test_gpts import gpt_model

LAYERS = 4
UNEVEN = (((0,),), ((1, 2),), ((3,),))
INTERLEAVED = (((0,), (2,)), ((1,), (3,)))
PIPELINES = {"pp1": even(4), "pp2": even(4, 2), "pp3 uneven": UNEVEN, "pp2 vpp2": INTERLEAVED}


@functools.cache
def _gpt2() -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=45, n_layer=LAYERS, n_embd=32, n_head=4, n_positions=24, bos_token_id=44, eos_token_id=44
    )
    return tiny_model(AutoModelForCausalLM, config)


@functools.cache
def _llama() -> Any:
    return tiny_llama(num_key_value_heads=4, num_attention_heads=8)


@functools.cache
def _bert() -> Any:
    return tiny_bert("PreTraining")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """The models as Hugging Face saved them, opened."""
    folder = tmp_path_factory.mktemp("references")
    for name, model in (("gpt2", _gpt2()), ("llama", _llama()), ("bert", _bert())):
        model.save_pretrained(folder / name)
    return {each.name: weights_of(each) for each in folder.iterdir()}


def _layout(version: float | None, tp: int, pipeline: str, **fields: Any) -> Layout:
    return Layout(stages=PIPELINES[pipeline], version=version, tp=tp, **fields)


LAYOUTS = (
    *(_layout(None, 1, "pp1"), _layout(None, 2, "pp2 vpp2"), _layout(0, 2, "pp2"), _layout(0, 4, "pp3 uneven")),
    *(_layout(1.0, 1, "pp2"), _layout(1.0, 4, "pp1"), _layout(2.0, 2, "pp3 uneven"), _layout(2.0, 4, "pp2 vpp2")),
    *(_layout(3.0, 1, "pp2"), _layout(3.0, 2, "pp2 vpp2"), _layout(3.0, 4, "pp3 uneven")),
    _layout(None, 2, "pp2", names=FIRST_RELEASES, is_zip=False),
    _layout(3.0, 2, "pp2", names=LAST_RELEASES, dtype=torch.float16),
    _layout(3.0, 2, "pp2", names=TRANSFORMER_ENGINE, dtype=torch.bfloat16, is_zip=False),
)
"""Versions, layouts, and names, dtypes and files of all releases."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_a_gpt_of_every_version_and_layout(references: dict[str, Weights], tmp_path: Path, layout: Layout) -> None:
    write(tmp_path, layout, gpt2(_gpt2()))

    read = weights_of(tmp_path)

    assert_same_weights(read, references["gpt2"])
    assert {tensor.dtype for tensor in read.tensors.values()} == {layout.dtype}
    assert read.source.iteration == 40


@pytest.mark.parametrize("is_of_core", [False, True])
@pytest.mark.parametrize(("tp", "pipeline"), [(1, "pp1"), (2, "pp2"), (4, "pp3 uneven"), (2, "pp2 vpp2")])
def test_a_decoder_with_groups_gates_and_an_output_layer(
    references: dict[str, Weights], tmp_path: Path, tp: int, pipeline: str, is_of_core: bool
) -> None:
    own: dict[str, Any] = {"version": None, "names": MEGATRON_CORE} if is_of_core else {"version": 3.0}
    write(tmp_path, _layout(tp=tp, pipeline=pipeline, **own), llama(_llama()))

    read = weights_of(tmp_path)

    assert_same_weights(read, references["llama"])
    assert read.source.model == references["llama"].source.model


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rotary_base": 500000}),
    "llama with longer contexts": (
        {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8192}},
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
    ),
    "qwen2": ({"tie_word_embeddings": True}, {}),
    "qwen3": ({"head_dim": 16}, {}),
    "mistral": ({"sliding_window": 8}, {"window_size": (7, 0)}),
}
"""Fields of the config, and what Megatron-LM's arguments say of them."""


@pytest.mark.parametrize(("pp", "is_of_core"), [(1, False), (2, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_rotary_positions_are_told_apart(tmp_path: Path, family: str, pp: int, is_of_core: bool) -> None:
    fields, arguments = FAMILIES[family]
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 24, "head_dim": 8, "sliding_window": None}
    model = gpt_model(family.split()[0], {**sizes, "tie_word_embeddings": False, **fields})
    model.save_pretrained(tmp_path / "hf")
    layout = Layout(stages=even(2, pp), tp=2, arguments=arguments, names=MEGATRON_CORE if is_of_core else {})
    write(tmp_path / "legacy", layout, llama(model))

    read, reference = weights_of(tmp_path / "legacy"), weights_of(tmp_path / "hf")

    assert_same_weights(read, reference)
    assert read.source.model == reference.source.model


@pytest.mark.parametrize(
    ("told", "activation"), [("bias_gelu_fusion", "gelu_fast"), ("openai_gelu", "gelu_new"), ("", "gelu")]
)
def test_activations(tmp_path: Path, told: str, activation: str) -> None:
    _one_rank(tmp_path, arguments={name: name == told for name in ("bias_gelu_fusion", "openai_gelu")})
    assert open_source(tmp_path).hf_config.activation_function == activation


@pytest.mark.parametrize(
    ("tp", "pp", "version", "heads"),
    [(1, 1, 0, (True, True)), (2, 2, 2.0, (True, True)), (4, 1, 1.0, (True, False)), (2, 2, 0, (False, True))],
)
def test_a_bert_with_and_without_its_second_head(
    references: dict[str, Weights], tmp_path: Path, tp: int, pp: int, version: float, heads: tuple[bool, bool]
) -> None:
    layout = Layout(stages=even(2, pp), tp=tp, version=version)
    write(tmp_path, layout, bert(_bert(), has_binary_head=heads[0], has_pooler=heads[1]))

    read = weights_of(tmp_path)

    assert read.source.model.task == ("pretraining" if all(heads) else "masked_lm")
    if all(heads):
        assert_same_weights(read, references["bert"])
    second = {key for key in references["bert"].tensors if key.name.startswith(("pooler.", "binary_head."))}
    assert set(read.tensors) == set(references["bert"].tensors) - (set() if all(heads) else second)


# ---- where it is ----------------------------------------------------------------------------------------------------


def _one_rank(folder: Path, **fields: Any) -> Path:
    return write(folder, Layout(**{"stages": even(LAYERS), **fields}), gpt2(_gpt2()))


def test_every_way_to_name_a_checkpoint(references: dict[str, Weights], tmp_path: Path) -> None:
    iteration = _one_rank(tmp_path)
    ways = [tmp_path, iteration, iteration / "mp_rank_00", iteration / "mp_rank_00" / "model_optim_rng.pt"]
    for path in ways:
        assert_same_weights(weights_of(path), references["gpt2"])
    ways.append(tmp_path / "gpt2_345m.pt")
    shutil.copyfile(ways[3], ways[4])
    assert_same_weights(weights_of(ways[4]), references["gpt2"])

    write(tmp_path, Layout(stages=even(LAYERS)), gpt2(_gpt2()), iteration=80)
    assert open_source(tmp_path).iteration == 80
    assert open_source(tmp_path, None, 40).iteration == 40
    iteration.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_same_weights(weights_of(tmp_path), references["gpt2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("41")
    with pytest.raises(ValueError, match="expected iter_0000041 .*says '41'.*, got iter_0000080, release"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="expected iter_0000007 .iteration=7., got iter_0000080, release"):
        open_source(tmp_path, None, 7)
    assert find_source(tmp_path / "latest_checkpointed_iteration.txt") is None


@pytest.mark.parametrize(
    ("member", "is_zip", "compression"),
    [
        ("release/mp_rank_00/model_optim_rng.pt", False, zipfile.ZIP_DEFLATED),
        ("model_optim_rng.pt", True, zipfile.ZIP_STORED),
        ("../../mp_rank_00/model_optim_rng.pt", True, zipfile.ZIP_DEFLATED),
    ],
)
def test_nvidias_zip_files(
    references: dict[str, Weights], tmp_path: Path, member: str, is_zip: bool, compression: int
) -> None:
    file = _one_rank(tmp_path / "in", is_zip=is_zip, version=None, names=FIRST_RELEASES)
    archive = tmp_path / "megatron_gpt2_345m_v0_0.zip"
    with zipfile.ZipFile(archive, "w", compression) as opened:
        opened.writestr("latest_checkpointed_iteration.txt", "release")
        opened.write(file / "mp_rank_00" / "model_optim_rng.pt", member)
    before = sorted(path for path in tmp_path.parent.rglob("*"))

    assert_same_weights(weights_of(archive), references["gpt2"])
    assert sorted(path for path in tmp_path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("config", "rows", "told"),
    [
        ({"model_type": "gpt2"}, 50304, ("gpt2", 50257, 16, "gelu_new")),
        # As the script of transformers and the config.json on the hub have it: with the rows that pad it.
        ({"model_type": "megatron-bert"}, 29056, ("megatron-bert", 29056, 16, "gelu")),
        ({"model_type": "gpt2"}, 50048, None),
        ({"model_type": "gpt2", "n_layer": 23}, 50304, None),
        ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12}, 50304, None),
    ],
)
def test_without_arguments_only_nvidias_345m_models_are_known(
    config: dict[str, Any], rows: int, told: tuple[Any, ...] | None
) -> None:
    # Of the tensors of such a file no more than their shapes counts here.
    sizes = {"n_layer": 24, "n_embd": 1024, "n_head": 16} if config["model_type"] == "gpt2" else {"hidden_size": 1024}
    fields = config_object({**sizes, **config})
    stack = "encoder" if config["model_type"] == "megatron-bert" else "decoder"
    h, last = fields.hidden_size, Key(f"{stack}.layers.mlp.linear_fc1.weight", fields.num_hidden_layers - 1)
    of = {
        Key(rule.megatron, 0 if ".layers." in rule.megatron else None): (1,) for rule in rules_of(model_config(fields))
    }
    of |= {
        Key("embedding.word_embeddings.weight"): (rows, h),
        Key("embedding.position_embeddings.weight"): (fields.max_position_embeddings, h),
        Key("embedding.tokentype_embeddings.weight"): (2, h),
        Key(f"{stack}.layers.self_attention.linear_qkv.weight", 0): (3 * h, h),
        Key(f"{stack}.layers.self_attention.linear_proj.weight", 0): (h, h),
        Key(f"{stack}.layers.mlp.linear_fc2.weight", 0): (h, 4 * h),
        **dict.fromkeys((last, last._replace(layer=0)), (4 * h, h)),
    }
    if stack == "decoder":
        del of[Key("embedding.tokentype_embeddings.weight")]
    if told is None:
        with pytest.raises(CheckpointError, match=r"no arguments \(args\), and its shapes .* are not those .*--config"):
            described_by({}, of, 1, None, Path("legacy"))
        return
    _, hf_config = described_by({}, of, 1, None, Path("legacy"))
    activation = hf_config.activation_function if stack == "decoder" else hf_config.hidden_act
    assert (hf_config.model_type, hf_config.vocab_size, hf_config.num_attention_heads, activation) == told


def test_heads_that_nothing_tells_need_a_config(tmp_path: Path) -> None:
    """Heads of 64 columns, as NVIDIA's have, were guessed once: one head on two ranks left both without a row."""
    from transformers import AutoModelForCausalLM, GPT2Config

    model = tiny_model(AutoModelForCausalLM, GPT2Config(vocab_size=50257, n_layer=1, n_embd=64, n_head=4))
    write(tmp_path / "legacy", Layout(stages=even(1), version=None, arguments=None, padding=47, tp=2), gpt2(model))
    model.save_pretrained(tmp_path / "hf")
    options = ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "out", to="hf")
    with pytest.raises(CheckpointError, match="nothing says how many heads.*--config"):
        convert(options)
    assert not options.save_path.exists()

    assert_same_weights(weights_of(tmp_path / "legacy", tmp_path / "hf"), weights_of(tmp_path / "hf"))
    model.config.n_head = 1
    model.config.save_pretrained(tmp_path / "wrong")
    with pytest.raises(CheckpointError, match="num_attention_heads: expected a multiple of the checkpoint's tp=2"):
        open_source(tmp_path / "legacy", tmp_path / "wrong")


def test_rows_that_may_pad_the_vocabulary_are_kept_and_mentioned(
    references: dict[str, Weights], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _one_rank(tmp_path, arguments={"orig_vocab_size": None})

    assert open_source(tmp_path).model.vocab_size == 48
    assert "whether some rows of its vocabulary of 48 only pad it" in caplog.text
    caplog.clear()
    config = references["gpt2"].source.path / "config.json"
    assert_same_weights(weights_of(tmp_path, config), references["gpt2"])
    assert not caplog.text
