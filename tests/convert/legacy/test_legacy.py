"""Legacy checkpoints of Megatron-LM: exact reading of every layout, refusals, writing.

Reading and writing are compared with shards made by hand (layouts.py). Written arguments and the shards of a T5 are
compared with recorded ones in tests/golden.
"""

import functools
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.convert import inferred_model
from lightning_megatron.convert.formats import find_source, open_source
from lightning_megatron.convert.megatron_arguments import (
    SHARED_NAMES,
    WITHOUT_ARGUMENT,
    fields_without_argument,
)
from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig
from tests.convert.directories import converted, tensors_in, tiny_bert, tiny_gpt2, tiny_llama
from tests.convert.legacy.layouts import (
    FIRST_RELEASES,
    LAST_RELEASES,
    MEGATRON_CORE,
    TRANSFORMER_ENGINE,
    Layout,
    bert,
    even,
    flat,
    gpt2,
    llama,
    load,
    write,
)
from tests.convert.weights import Weights, assert_same_weights, weights_of
from tests.families.test_gpts import CONFIGS, gpt_model
from tests.parity.comparison import assert_same

LAYERS = 4
UNEVEN = (
    ((0,),),
    ((1, 2),),
    ((3,),),
)
INTERLEAVED = (((0,), (2,)), ((1,), (3,)))
PIPELINES = {
    "pp1": even(4),
    "pp2": even(4, 2),
    "pp3 uneven": UNEVEN,
    "pp2 vpp2": INTERLEAVED,
}


@functools.cache
def _gpt2() -> Any:
    return gpt_model(
        "gpt2", {"vocab_size": 45, "n_inner": None, "bos_token_id": 44, "eos_token_id": 44}
    )


@functools.cache
def _llama() -> Any:
    return tiny_llama(num_key_value_heads=4, num_attention_heads=8)


@functools.cache
def _bert() -> Any:
    return tiny_bert("PreTraining")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """The models as loaded from Hugging Face directories, by name."""
    folder = tmp_path_factory.mktemp("references")
    for name, model in (
        ("gpt2", _gpt2()),
        ("llama", _llama()),
        ("bert", _bert()),
    ):
        model.save_pretrained(folder / name)
    return {path.name: weights_of(path) for path in folder.iterdir()}


def _layout(
    version: float | None,
    tp: int,
    pipeline: str,
    **fields: Any,
) -> Layout:
    return Layout(
        stages=PIPELINES[pipeline],
        version=version,
        tp=tp,
        **fields,
    )


LAYOUTS = (
    _layout(None, 2, "pp2 vpp2"),
    _layout(0, 4, "pp3 uneven"),
    _layout(1.0, 1, "pp2"),
    _layout(1.0, 4, "pp1"),
    _layout(2.0, 2, "pp3 uneven"),
    _layout(3.0, 4, "pp2 vpp2"),
    _layout(None, 2, "pp2", names=FIRST_RELEASES, is_zip=False),
    _layout(3.0, 2, "pp2", names=LAST_RELEASES, dtype=torch.float16),
    _layout(
        3.0,
        2,
        "pp2",
        names=TRANSFORMER_ENGINE,
        dtype=torch.bfloat16,
        is_zip=False,
    ),
)
"""Checkpoint versions and layouts; tensor names, dtypes and file formats of all releases."""


@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=range(len(LAYOUTS)),
)
def test_gpt_of_every_version_and_layout(
    references: dict[str, Weights], tmp_path: Path, layout: Layout
) -> None:
    write(tmp_path, layout, gpt2(_gpt2()))
    read = weights_of(tmp_path)
    assert_same_weights(read, references["gpt2"])
    assert {tensor.dtype for tensor in read.tensors.values()} == {layout.dtype}
    assert read.source.iteration == 40


@pytest.mark.parametrize(
    ("tp", "pipeline", "is_core"),
    [
        (4, "pp3 uneven", False),
        (2, "pp2 vpp2", False),
        (1, "pp2", True),
        (4, "pp3 uneven", True),
    ],
)
def test_llama_of_every_layout(
    references: dict[str, Weights],
    tmp_path: Path,
    tp: int,
    pipeline: str,
    is_core: bool,
) -> None:
    fields: dict[str, Any] = (
        {"version": None, "names": MEGATRON_CORE} if is_core else {"version": 3.0}
    )
    write(
        tmp_path,
        _layout(tp=tp, pipeline=pipeline, **fields),
        llama(_llama()),
    )
    read = weights_of(tmp_path)
    assert_same_weights(read, references["llama"])
    assert read.source.model == references["llama"].source.model


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rotary_base": 500000},
    ),
    "llama with llama3 scaling": (
        {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8192}},
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
    ),
    "qwen2": ({"tie_word_embeddings": True}, {}),
    "qwen3": ({"head_dim": 16}, {}),
    "llama with linear scaling": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rotary_seq_len_interpolation_factor": 4},
    ),
    "mistral": ({"sliding_window": 8}, {"window_size": (7, 0)}),
}
"""Fields of the Hugging Face config, and the equivalent arguments of Megatron-LM."""


@pytest.mark.parametrize(
    ("family", "writer"),
    [
        *((family, "ours") for family in FAMILIES),
        *zip(FAMILIES, ["legacy", "core"] * 3, strict=True),
    ],
)
def test_arguments_identify_families_with_rotary_positions(
    tmp_path: Path, family: str, writer: str
) -> None:
    """Megatron-LM's arguments and, without the embedded config, those that this package writes."""
    fields, arguments = FAMILIES[family]
    sizes = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 24,
        "head_dim": 8,
        "sliding_window": None,
    }
    model = gpt_model(family.split()[0], {**sizes, "tie_word_embeddings": False, **fields})
    if writer == "ours":
        _write(model, tmp_path, tp=2)
        for file in (tmp_path / "legacy").rglob(FILE):
            _rewrite(file, lambda state: vars(state["args"]).pop("hugging_face_config"))
    else:
        model.save_pretrained(tmp_path / "hf")
        names, pp = (MEGATRON_CORE, 2) if writer == "core" else ({}, 1)
        write(
            tmp_path / "legacy",
            Layout(
                stages=even(2, pp),
                tp=2,
                arguments=arguments,
                names=names,
            ),
            llama(model),
        )

    read = weights_of(tmp_path / "legacy")
    reference = weights_of(tmp_path / "hf")

    assert_same_weights(read, reference)
    assert read.source.model == reference.source.model


def test_arguments_determine_the_activation(tmp_path: Path) -> None:
    for argument, activation in (
        ("bias_gelu_fusion", "gelu_fast"),
        ("openai_gelu", "gelu_new"),
        ("", "gelu"),
    ):
        arguments = {name: name == argument for name in ("bias_gelu_fusion", "openai_gelu")}
        _write_one_rank(tmp_path / argument, arguments=arguments)
        assert open_source(tmp_path / argument).hf_config.activation_function == activation


@pytest.mark.parametrize(
    ("tp", "pp", "version", "heads"),
    [
        (1, 1, 0, (True, True)),
        (2, 2, 2.0, (True, True)),
        (4, 1, 1.0, (True, False)),
        (2, 2, 0, (False, True)),
    ],
)
def test_bert_with_and_without_pooler_and_binary_head(
    references: dict[str, Weights],
    tmp_path: Path,
    tp: int,
    pp: int,
    version: float,
    heads: tuple[bool, bool],
) -> None:
    layout = Layout(
        stages=even(LAYERS, pp),
        tp=tp,
        version=version,
    )
    write(
        tmp_path,
        layout,
        bert(
            _bert(),
            has_binary_head=heads[0],
            has_pooler=heads[1],
        ),
    )
    read = weights_of(tmp_path)
    assert read.source.model.task == ("pretraining" if all(heads) else "masked_lm")
    expected = set(references["bert"].tensors)
    if all(heads):
        assert_same_weights(read, references["bert"])
    else:
        of_second_head = ("pooler.", "binary_head.")
        expected = {key for key in expected if not key.name.startswith(of_second_head)}
    assert set(read.tensors) == expected


# ---- paths ----------------------------------------------------------------------------------------------------------


def _write_one_rank(folder: Path, **fields: Any) -> Path:
    return write(
        folder,
        Layout(**{"stages": even(LAYERS), **fields}),
        gpt2(_gpt2()),
    )


def test_every_path_to_a_checkpoint_is_accepted(
    references: dict[str, Weights], tmp_path: Path
) -> None:
    iteration = _write_one_rank(tmp_path)
    paths = [
        tmp_path,
        iteration,
        iteration / "mp_rank_00",
        iteration / "mp_rank_00" / "model_optim_rng.pt",
    ]
    for path in paths:
        assert_same_weights(weights_of(path), references["gpt2"])
    shutil.copyfile(paths[3], tmp_path / "gpt2_345m.pt")
    assert_same_weights(weights_of(tmp_path / "gpt2_345m.pt"), references["gpt2"])

    write(
        tmp_path,
        Layout(stages=even(LAYERS)),
        gpt2(_gpt2()),
        iteration=80,
    )
    assert open_source(tmp_path).iteration == 80
    assert open_source(tmp_path, None, 40).iteration == 40
    iteration.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_same_weights(weights_of(tmp_path), references["gpt2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("41")
    with pytest.raises(
        ValueError, match="expected iter_0000041 .*says '41'.*, got iter_0000080, release"
    ):
        open_source(tmp_path)
    with pytest.raises(
        ValueError, match="expected iter_0000007 .iteration=7., got iter_0000080, release"
    ):
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
def test_zip_files_of_nvidia_are_read(
    references: dict[str, Weights],
    tmp_path: Path,
    member: str,
    is_zip: bool,
    compression: int,
) -> None:
    file = _write_one_rank(tmp_path / "in", is_zip=is_zip, version=None, names=FIRST_RELEASES)
    archive = tmp_path / "megatron_gpt2_345m_v0_0.zip"
    with zipfile.ZipFile(archive, "w", compression) as opened:
        opened.writestr("latest_checkpointed_iteration.txt", "release")
        opened.write(file / "mp_rank_00" / "model_optim_rng.pt", member)
    before = sorted(path for path in tmp_path.parent.rglob("*"))

    assert_same_weights(weights_of(archive), references["gpt2"])
    assert sorted(path for path in tmp_path.parent.rglob("*")) == before


def test_without_arguments_only_nvidia_345m_models_are_recognized(
    references: dict[str, Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = inferred_model._PUBLISHED
    assert published["gpt"][:2] == ((24, 1024, 4096, 1024), (50257,))
    assert published["bert"][:2] == ((24, 1024, 4096, 512), (28996, 30522))
    of_tests = {
        "gpt": ((LAYERS, 32, 128, 24), (45,)),
        "bert": ((LAYERS, 32, 48, 24), (80,)),
    }
    small = {
        name: (*sizes, {**published[name][2], "num_attention_heads": 4})
        for name, sizes in of_tests.items()
    }
    for name, model in (("gpt2", gpt2(_gpt2())), ("bert", bert(_bert()))):
        layout = Layout(
            stages=even(LAYERS),
            version=None,
            arguments=None,
            padding=0,
        )
        path = write(tmp_path / name, layout, model)
        config = references[name].source.path
        with pytest.raises(
            CheckpointError,
            match=r"no arguments \(args\), and its shapes .* are not those .*--config",
        ):
            converted(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert_same_weights(weights_of(path, config), references[name])
        with monkeypatch.context() as patched:
            patched.setattr(inferred_model, "_PUBLISHED", small)
            weights = weights_of(path)
        assert_same_weights(weights, references[name])
        assert weights.source.model.activation == {"gpt2": "gelu_tanh", "bert": "gelu"}[name]


def test_config_whose_heads_tp_does_not_divide_is_refused(tmp_path: Path) -> None:
    """One head on two ranks once left both ranks without rows."""
    model = tiny_gpt2()
    _write_small(tmp_path / "legacy", version=None, arguments=None)
    model.config.n_head = 1
    model.config.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match="num_attention_heads: expected a multiple of the checkpoint's tp=2"
    ):
        open_source(tmp_path / "legacy", tmp_path / "config.json")


def test_unknown_vocabulary_padding_is_kept_with_a_warning(
    references: dict[str, Weights], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_one_rank(tmp_path, arguments={"orig_vocab_size": None})

    assert open_source(tmp_path).model.vocab_size == 48
    assert "how many rows of its vocabulary of 48 are padding" in caplog.text
    caplog.clear()
    config = references["gpt2"].source.path / "config.json"
    assert_same_weights(weights_of(tmp_path, config), references["gpt2"])
    assert not caplog.text


# ---- errors ---------------------------------------------------------------------------------------------------------

FILE = "model_optim_rng.pt"


def _write_small(folder: Path, **fields: Any) -> Path:
    return write(
        folder,
        Layout(**{"stages": even(2, 2), "tp": 2, **fields}),
        gpt2(tiny_gpt2()),
    )


def _rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = load(file)
    change(state)
    torch.save(state, file)


def _encoder(state: dict[str, Any]) -> dict[str, Tensor]:
    encoder: dict[str, Tensor] = state["model"]["language_model"]["encoder"]
    return encoder


def test_missing_rank_files_are_refused(tmp_path: Path) -> None:
    folder = _write_small(tmp_path)
    alone = "written with tensor_model_parallel_size=2 and has the files of 1"
    for path in (folder / "mp_rank_01_001", folder / "mp_rank_00_000" / FILE):
        with pytest.raises(CheckpointError, match=alone):
            weights_of(path)
    (folder / "mp_rank_01_000" / FILE).unlink()
    with pytest.raises(
        CheckpointError, match="lacks the file of mp_rank_01_000: there are 3 of tp=2 x pp=2"
    ):
        weights_of(folder)
    (folder / "mp_rank_01_001" / FILE).unlink()
    with pytest.raises(CheckpointError, match=alone):
        weights_of(folder)


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "a shape of one rank": (
        "mp_rank_01_000",
        lambda state: _encoder(state).update({"layers.0.input_layernorm.weight": torch.ones(31)}),
        "is a mixture: mp_rank_01_000 has other tensors, another version or iteration than mp_rank_00_000",
    ),
    "an iteration of one rank": (
        "mp_rank_01_000",
        lambda state: state.update(iteration=state.get("iteration", 0) + 1),
        "is a mixture: mp_rank_01_000 has other tensors, another version or iteration",
    ),
    "an unknown version": (
        "mp_rank_*",
        lambda state: state.update(checkpoint_version=4.0),
        "checkpoint_version=4 is unknown; known are 0, 1, 2, 3",
    ),
    "the copy of the embedding": (
        "mp_rank_01_001",
        lambda state: state["model"]["word_embeddings_for_head"]["weight"][0, 0].add_(1),
        "have different copies of embedding.word_embeddings.weight",
    ),
    "a tensor too few": (
        "mp_rank_*_001",
        lambda state: _encoder(state).pop("layers.0.mlp.dense_4h_to_h.bias"),
        "'decoder.layers.1.mlp.linear_fc2.bias' is missing",
    ),
    "experts": (
        "mp_rank_*",
        lambda state: vars(state["args"]).update(num_experts=8),
        "family has num_experts=8",
    ),
    "a foreign config": (
        "mp_rank_*",
        lambda state: vars(state["args"]).update(hugging_face_config='{"model_type": "mamba"}'),
        "'mamba' is not a known model family",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_damaged_checkpoint_is_refused(tmp_path: Path, case: str) -> None:
    ranks, change, message = CHANGES[case]
    folder = _write_small(tmp_path)
    for rank_folder in folder.glob(ranks):
        _rewrite(rank_folder / FILE, change)
    with pytest.raises(ValueError, match=message) as error:
        weights_of(tmp_path)
    assert "\n" not in str(error.value)


def test_config_of_another_model_is_refused(tmp_path: Path) -> None:
    _write_small(tmp_path / "gpt2")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**tiny_gpt2().config.to_dict(), "n_layer": 3, "vocab_size": 500}))
    with pytest.raises(
        CheckpointError, match=r"word_embeddings.weight' has the shape \[\d+, 32\], not \[500"
    ) as error:
        weights_of(tmp_path / "gpt2", config)
    assert "'decoder.layers.2.self_attention.linear_qkv.weight' is missing" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_percent", 0.25),
        ("position_embedding_type", "alibi"),
        ("window_attn_skip_freq", 2),
        ("softmax_type", "off-by-one"),
        ("layernorm_zero_centered_gamma", True),
        ("heterogeneous_layers_config_path", "layers.json"),
        ("spec", ["mine.layers"]),
    ],
)
def test_decoder_of_no_known_family_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    write(
        tmp_path,
        Layout(stages=even(4), arguments={name: value}),
        llama(tiny_llama()),
    )
    shown = " ".join(value) if isinstance(value, list) else value
    with pytest.raises(CheckpointError, match=f"{name}={shown}.*give the Hugging Face config.json"):
        weights_of(tmp_path)


def test_encoder_with_a_window_is_refused(tmp_path: Path) -> None:
    write(tmp_path, Layout(stages=even(4), arguments={"window_size": [4, 4]}), bert(_bert()))
    with pytest.raises(CheckpointError, match="no known model family has sliding_window=5"):
        weights_of(tmp_path)


def test_damaged_zip_file_is_refused(tmp_path: Path) -> None:
    file = (
        _write_small(
            tmp_path / "in",
            tp=1,
            stages=even(2),
        )
        / "mp_rank_00"
        / FILE
    )
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.write(file, f"release/mp_rank_00/{FILE}")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 4
    archive.write_bytes(data)
    with pytest.raises(CheckpointError, match="zip file .* cannot be unpacked"):
        weights_of(archive)


# ---- writing --------------------------------------------------------------------------------------------------------


def _write(
    model: Any,
    folder: Path,
    **fields: Any,
) -> dict[str, Tensor]:
    """Write ``model`` as ``folder / "legacy"``; returns its weights under Hugging Face's names."""
    model.save_pretrained(folder / "hf")
    # With this small multiple every layout has vocabulary padding.
    options: dict[str, Any] = {"to": "megatron-legacy", "make_vocab_size_divisible_by": 8, **fields}
    converted(folder / "hf", folder / "legacy", **options)
    weights: dict[str, Tensor] = model.state_dict()
    return weights


WRITTEN: dict[str, tuple[Any, Any, Layout]] = {
    "gpt2 at tp2 pp2": (
        tiny_gpt2,
        gpt2,
        Layout(stages=even(2, 2), tp=2),
    ),
    "bert at tp2 pp2": (
        _bert,
        bert,
        Layout(stages=even(4, 2), tp=2),
    ),
    "llama at tp2 pp2 vpp2": (
        tiny_llama,
        llama,
        Layout(
            stages=(((0,), (2,)), ((1,), (3,))),
            tp=2,
        ),
    ),
    "llama at pp3": (tiny_llama, llama, Layout(stages=(((0, 1),), ((2,),), ((3,),)))),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_written_shards_equal_shards_made_by_hand(tmp_path: Path, case: str) -> None:
    make_model, to_megatron, layout = WRITTEN[case]
    # Pads 83 tokens to a multiple of 8 x tp.
    layout = replace(
        layout,
        padding=13 if layout.tp == 2 else 5,
        padding_is_zero=True,
    )
    write(tmp_path / "by_hand", layout, to_megatron(make_model()))
    num_chunks = len(layout.stages[0])
    pipeline = {"pp": len(layout.stages), "vpp": num_chunks if num_chunks > 1 else None}
    _write(make_model(), tmp_path, tp=layout.tp, **pipeline)

    files = sorted((tmp_path / "by_hand").rglob("model_optim_rng.pt"))
    assert len(files) == layout.tp * len(layout.stages)
    for file in files:
        by_hand = load(file)
        ours = load(tmp_path / "legacy" / "release" / file.parent.name / file.name)
        for chunk in by_hand.keys() | ours.keys():
            if not chunk.startswith("model"):
                continue
            expected = flat(by_hand[chunk])
            actual = flat(ours[chunk])
            assert_same(actual, expected)
            assert all(tensor.is_contiguous() for tensor in actual.values())
            # Readers rely on the order: layers first and ascending, each weight before its bias.
            inside = [name for name in actual if ".encoder.layers." in name]
            assert [int(name.split(".")[3]) for name in inside] == sorted(
                int(name.split(".")[3]) for name in inside
            )
            assert all(
                not name.endswith("bias") or f"{name[:-4]}weight" in inside[:i]
                for i, name in enumerate(inside)
            )
            assert not any(
                "final_" in name for name in [n for n in actual if ".encoder." in n][: len(inside)]
            )
    assert (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_llama_round_trips_through_files_of_a_distributed_optimizer(tmp_path: Path) -> None:
    expected = _write(
        tiny_llama(),
        tmp_path,
        pp=2,
        vpp=2,
        tp=2,
    )
    for file in list(
        (tmp_path / "legacy").rglob("model_optim_rng.pt")
    ):  # file names of Megatron-LM in 2022
        (own := file.parent.with_name(f"{file.parent.name}_000")).mkdir()
        (own / "optim.pt").touch()
        file.rename(file.with_name("model_rng.pt"))
    assert_same(tensors_in(converted(tmp_path / "legacy", tmp_path / "back")), expected)


_SAID = {
    "llama": "",
    "llama tied, biased": "",
    "gpt2": "",
    "mistral": "",
    "qwen2": "",
    "qwen3": "",
    "nemotron": "",
    "stablelm": "",
    "qwen2 windows in later layers": "sliding_window_layers",
    "bloom": "embedding_layernorm position_embedding_type",
    "opt": "position_offset activation",
    "gemma": "embedding_multiplier activation",
    "granite": "softmax_scale embedding_multiplier residual_multiplier logits_multiplier",
    "cohere": "norm_bias parallel_attention logits_multiplier",
    "smollm3": "no_rope_layers",
    "olmo2": "pre_norms post_norms qk_layernorm_of_all_heads",
    "hunyuan_v1_dense": "qk_layernorm_after_rotary",
    "ministral3": "query_scaling_beta rope_scaling",
    "apertus": "rope_scaling activation",
}
"""Fields that Megatron-LM has no arguments for, by the names of tiny models."""


@pytest.mark.parametrize("name", _SAID)
def test_what_megatron_lm_has_no_arguments_for_is_said(name: str) -> None:
    found = fields_without_argument(model_config(CONFIGS[name]))
    assert [each.partition("=")[0] for each in found] == _SAID[name].split()


_OF_TRAINING = {
    "classifier_dropout",
    "embedding_dropout",
    "attention_output_dropout",
    "activation_dropout",
    "scaled_residual_init",
    "lora",
    "lora_dropout",
}
_REFUSED_OR_DERIVED = {
    "latent_attention",
    "linear_attention",
    "attention_output_gate",
    "experts",
    "query_scaling_length",
    "parallel_attention_norms",
    "alibi_scaled",
}
_OTHERWISE = {
    "family",
    "architecture",
    "task",
    "vocab_size",
    "max_position_embeddings",
    "num_decoder_layers",
    "share_embeddings_and_output_weights",
    "zero_centered_norms",
    "gated_linear_unit",
    "activation",
    "add_attention_output_bias",
    "rope_scaling",
    "sliding_window",
    "sliding_window_layers",
    "num_labels",
    "problem_type",
    "classifier_bias",
    "decoder_start_token_id",
    "pad_token_id",
}
"""Fields with an argument of another name, or that say what a head or a batch is like."""


def test_every_field_of_a_model_has_an_argument_or_none_on_purpose() -> None:
    known = {*SHARED_NAMES, *WITHOUT_ARGUMENT, *_OF_TRAINING, *_REFUSED_OR_DERIVED, *_OTHERWISE}
    assert known == set(ModelConfig.__dataclass_fields__)
