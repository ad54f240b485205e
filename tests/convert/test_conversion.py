"""A converted model is the same model, bit for bit, in every family and format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_megatron.convert.formats import open_source
from lightning_megatron.convert.shards import Key
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.checkpoint.runs import LLAMA, Run, fit, read_tensors, train
from tests.convert.directories import (
    FORMATS,
    MODELS,
    converted,
    save_as,
    tensors_in,
    tiny,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
)
from tests.convert.legacy.layouts import flat, load
from tests.convert.weights import weights_of
from tests.families.test_experts import mixture
from tests.families.test_gpts import gpt_model
from tests.marks import exhaustive
from tests.parity.comparison import assert_same
from tests.ranks import run_ranks
from tests.tokenizers import save_word_tokenizer


def _outputs(model: Any) -> Tensor:
    tokens = torch.arange(1, 17).reshape(2, 8)
    extra = {"decoder_input_ids": tokens.flip(0)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        outputs: Tensor = model.eval()(input_ids=tokens, **extra)[0]
    return outputs


_IN_EVERY_RUN = {
    "gpt2",
    "llama",
    "bloom",
    "falcon 40b",
    "glm4",
    "t5 untied",
    "megatron-bert-PreTraining",
}
"""Models with distinct files or weight layouts; the others run with the exhaustive tests."""


@pytest.mark.parametrize(
    "name",
    [name if name in _IN_EVERY_RUN else exhaustive(name) for name in MODELS],
)
def test_round_trip_through_every_format_is_exact(tmp_path: Path, name: str) -> None:
    model = tiny(name)
    save_as(
        model,
        tmp_path / "hf",
        FORMATS[MODELS.index(name) % len(FORMATS)],
    )
    expected = save_as(model, tmp_path / "expected", "safetensors")
    layers = 5 if "t5" in name else 3  # does not divide the number of layers
    steps: list[dict[str, Any]] = [
        {"to": "megatron-legacy", "tp": 4, "pp": layers, "make_vocab_size_divisible_by": 8},
        {"to": "megatron", "tp": 2, "pp": 2},
        {"to": "megatron-legacy"},
        {"to": "megatron", "make_vocab_size_divisible_by": 1},
        {"to": "hf", "max_shard_size": "20KB"},
    ]
    source = tmp_path / "hf"
    for number, step in enumerate(steps):
        source = converted(source, tmp_path / str(number), **step)
    assert len(list(source.glob("*.safetensors"))) > 1
    assert_same(tensors_in(source), expected)
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "expected/config.json").read_text()
    )
    loaded, report = type(model).from_pretrained(
        source, output_loading_info=True, attn_implementation=model.config._attn_implementation
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(_outputs(loaded), _outputs(model))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {}),
        ("qwen2_moe", {"mlp_only_layers": [1]}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("qwen3_next", {}),
    ],
    ids=[
        "stacked",
        "numbered layers",
        "experts in one tensor",
        "latent attention",
        "linear attention",
    ],
)
def test_experts_round_trip_and_legacy_format_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    mixture(family, **fields).save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "ckpt", to="megatron")
    assert_same(
        tensors_in(converted(tmp_path / "ckpt", tmp_path / "back")), tensors_in(tmp_path / "hf")
    )
    with pytest.raises(
        ConfigError,
        match=f"expected a model without experts.*, got {family}; use to=megatron or to=hf",
    ):
        converted(tmp_path / "ckpt", tmp_path / "legacy", to="megatron-legacy")


def test_legacy_format_has_no_latent_attention(tmp_path: Path) -> None:
    mixture("deepseek_v3", first_k_dense_replace=4).save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"got latent attention \(deepseek_v3\)"):
        converted(tmp_path / "hf", tmp_path / "legacy", to="megatron-legacy")


def test_legacy_format_has_no_linear_attention(tmp_path: Path) -> None:
    gpt_model("qwen3_5_text", {}).save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"got linear attention or gates \(qwen3_5_text\)"):
        converted(tmp_path / "hf", tmp_path / "legacy", to="megatron-legacy")


# ---- dtypes ---------------------------------------------------------------------------------------------------------


def test_each_tensor_keeps_its_dtype_unless_dtype_is_set(tmp_path: Path) -> None:
    expected = save_as(tiny("qwen3"), tmp_path / "source", "safetensors")
    dtypes = {
        ".weight": torch.bfloat16,
        "norm.weight": torch.float32,
        "embed_tokens.weight": torch.float16,
    }
    mixed = {
        name: tensor.to(
            next(dtype for suffix, dtype in reversed(dtypes.items()) if name.endswith(suffix))
        )
        for name, tensor in expected.items()
    }
    save_file(mixed, tmp_path / "source" / "model.safetensors")
    for dtype, expected_dtype in ((None, "bfloat16"), ("float16", "float16")):
        target = converted(tmp_path / "source", tmp_path / f"to {dtype}", dtype=dtype)
        assert_same(tensors_in(target), {n: t.half() for n, t in mixed.items()} if dtype else mixed)
        assert json.loads((target / "config.json").read_text())["dtype"] == expected_dtype


def test_values_that_overflow_float16_are_refused(tmp_path: Path) -> None:
    tensors = save_as(tiny_llama(), tmp_path / "source", "safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = -70000.0
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"decoder\.layers\.2\.mlp\.linear_fc1\.weight: expected values up to 6\.55e\+04 \(float16\), got 7e\+04",
    ):
        converted(tmp_path / "source", tmp_path / "target", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ---- heads ----------------------------------------------------------------------------------------------------------


def test_headless_model_stays_headless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_bert("PreTraining")
    model.bert.save_pretrained(tmp_path / "source")
    converted(tmp_path / "source", tmp_path / "target")
    expected = {f"bert.{name}": tensor for name, tensor in model.bert.state_dict().items()}
    assert_same(tensors_in(tmp_path / "target"), expected)
    assert "left out: cls.predictions.transform.dense.weight" in caplog.text
    loaded, report = type(model.bert).from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.architectures == ["MegatronBertModel"]
    for to in ("megatron", "megatron-legacy"):  # formats that training resumes from
        with pytest.raises(
            CheckpointError, match=r"lacks tensors of its head \(cls\.predictions.*to=hf"
        ):
            converted(tmp_path / "source", tmp_path / to, to=to)


# ---- tokenizer and configs ------------------------------------------------------------------------------------------


def test_tokenizer_and_generation_config_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    save_as(tiny_llama(), source, "safetensors")
    save_word_tokenizer(source, 83)
    (source / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "notes.txt").write_text("")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**fields, "auto_map": {"AutoModel": "modeling.Model"}})
    )
    converted(source, target)
    assert json.loads((target / "config.json").read_text()) == fields
    names = {path.name for path in target.iterdir()} - {"config.json", "model.safetensors"}
    assert names == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes()

    save_word_tokenizer(tmp_path / "small", 40)
    save_word_tokenizer(tmp_path / "large", 84)
    converted(source, tmp_path / "other", tokenizer=tmp_path / "small")
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == (
        tmp_path / "small/tokenizer.json"
    ).read_bytes()
    with pytest.raises(ValueError, match="ids up to 83, the model's vocab_size is 83"):
        converted(source, tmp_path / "another", tokenizer=tmp_path / "large")


# ---- several processes ----------------------------------------------------------------------------------------------


def _convert_on_ranks(folder: str, layout: dict[str, int]) -> str:
    """Convert to every format and back, each rank its shard; returns the error of a layout with another world size."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    path = Path(folder)
    try:
        converted(
            path / "hf",
            path / "legacy",
            to="megatron-legacy",
            make_vocab_size_divisible_by=8,
            **layout,
        )
        converted(path / "legacy", path / "a.ckpt", to="megatron", **layout)
        converted(path / "a.ckpt", path / "back", max_shard_size="20KB", **layout)
        try:
            converted(
                path / "hf",
                path / "other",
                to="megatron",
                tp=1,
                pp=1,
            )
        except ConfigError as error:
            return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_four_processes_convert_like_one(tmp_path: Path) -> None:
    layout = {"tp": 2, "pp": 2, "vpp": 2}
    expected = save_as(tiny_llama(), tmp_path / "hf", "safetensors")
    converted(
        tmp_path / "hf",
        tmp_path / "alone",
        to="megatron-legacy",
        make_vocab_size_divisible_by=8,
        **layout,
    )
    for error in run_ranks(_convert_on_ranks, 4, str(tmp_path), layout):
        assert "expected the 4 processes of torchrun, got 1" in error
    assert_same(tensors_in(tmp_path / "back"), expected)
    for file in (tmp_path / "alone").rglob("*.pt"):
        alone = load(file)
        sharded = load(tmp_path / "legacy" / file.relative_to(tmp_path / "alone"))
        assert vars(alone["args"]) == vars(sharded["args"])
        for name in alone.keys() - {"args", "checkpoint_version", "iteration", "optimizer"}:
            assert list(flat(sharded[name])) == list(flat(alone[name]))
            assert_same(flat(sharded[name]), flat(alone[name]))


def test_checkpoints_that_do_not_fit_are_not_averaged(tmp_path: Path) -> None:
    """Means themselves are compared in test_average.py."""
    tensors = save_as(tiny("llama"), tmp_path / "0", FORMATS[0])
    tensors["lm_head.weight"][0] = 1e6
    model = tiny("llama")
    model.load_state_dict(tensors)
    save_as(model, tmp_path / "large", FORMATS[0])
    with pytest.raises(
        CheckpointError, match=r"output_layer.weight: expected values up to 6.55e\+04 \(float16\)"
    ):
        converted(tmp_path / "0", tmp_path / "mixture", tmp_path / "large", dtype="fp16")
    save_as(tiny_gpt2(), tmp_path / "gpt2", FORMATS[0])
    with pytest.raises(
        CheckpointError,
        match=r"gpt2: expected the model of .*0 to average with, got one with other",
    ):
        converted(tmp_path / "0", tmp_path / "mixture", tmp_path / "gpt2")
    assert not (tmp_path / "mixture").exists()


# ---- checkpoints of runs, and loading by Megatron-Core --------------------------------------------------------------


def _train_and_save(run: Run, folder: str) -> None:
    """Train, then save a checkpoint and a Hugging Face directory."""
    trainer, _ = fit(run)
    trainer.save_checkpoint(Path(folder) / "run.ckpt")
    trainer.lightning_module.save_pretrained(Path(folder) / "expected")


def _load_with_megatron_core(checkpoint: str) -> dict[str, Tensor]:
    """Load a checkpoint into Megatron-Core's own GPT at tp=2, with only our process groups; this rank's weights."""
    from datetime import timedelta

    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lightning_megatron.engine import groups
    from lightning_megatron.engine.parallel import ParallelConfig
    from lightning_megatron.engine.runtime import Runtime

    dist.init_process_group("gloo")
    runtime = Runtime(torch.device("cpu"))
    groups.initialize(ParallelConfig(tp=2), timedelta(minutes=1))
    runtime.seed(1, 0)
    with runtime.active():
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=2,
            use_cpu_initialization=True,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=128,
            max_sequence_length=1024,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        )
        model.load_state_dict(
            dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)["model"]
        )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("model", "precision"),
    [exhaustive(LLAMA, "32-true"), ({}, "bf16-mixed")],
    ids=["llama", "gpt2-bf16"],
)
def test_converted_checkpoint_of_a_run_equals_save_pretrained(
    tmp_path: Path, model: dict[str, Any], precision: str
) -> None:
    strategy = {"tp": 2, "pp": 2, "sequence_parallel": True}
    run = Run(
        model=model,
        strategy=strategy,
        trainer={"max_steps": 2, "precision": precision},
    )
    run_ranks(_train_and_save, 4, run, str(tmp_path))

    converted(tmp_path / "run.ckpt", tmp_path / "back")
    converted(tmp_path / "run.ckpt", tmp_path / "legacy", to="megatron-legacy", tp=2)
    converted(
        tmp_path / "run.ckpt",
        tmp_path / "weights.ckpt",
        to="megatron",
        pp=2,
        make_vocab_size_divisible_by=8,
    )

    for step, source in enumerate((tmp_path / "legacy", tmp_path / "weights.ckpt")):
        converted(source, tmp_path / f"from{step}")
        assert_same(tensors_in(tmp_path / f"from{step}"), tensors_in(tmp_path / "expected"))
    assert_same(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "expected"))
    assert open_source(tmp_path / "run.ckpt").iteration == 2
    assert any(name.startswith("optimizer.") for name in read_tensors(tmp_path / "run.ckpt"))
    assert not any(
        name.startswith("optimizer.") for name in read_tensors(tmp_path / "weights.ckpt")
    )
    losses = []
    for name in ("run.ckpt", "weights.ckpt"):
        start = run.but(
            strategy={
                "tp": 1,
                "pp": 1,
                "sequence_parallel": False,
                "load_from": str(tmp_path / name),
            }
        )
        losses.append(
            run_ranks(
                train,
                1,
                start.but(trainer={"max_steps": 1}),
            )[0].steps[1]["loss"]
        )
    assert losses[0] == losses[1]


def test_megatron_core_loads_a_converted_checkpoint(tmp_path: Path) -> None:
    save_as(tiny_gpt2(), tmp_path / "source", "safetensors")
    converted(tmp_path / "source", tmp_path / "model.ckpt", to="megatron", pp=2)
    tensors = weights_of(tmp_path / "source").tensors

    for rank, weights in enumerate(
        run_ranks(_load_with_megatron_core, 2, str(tmp_path / "model.ckpt"))
    ):
        embedding = tensors[Key("embedding.word_embeddings.weight")][64 * rank : 64 * (rank + 1)]
        assert torch.equal(weights["embedding.word_embeddings.weight"][: len(embedding)], embedding)
        qkv = tensors[Key("decoder.layers.self_attention.linear_qkv.weight", 1)][
            48 * rank : 48 * (rank + 1)
        ]
        assert torch.equal(weights["decoder.layers.1.self_attention.linear_qkv.weight"], qkv)
        norm = tensors[Key("decoder.layers.mlp.linear_fc1.layer_norm_bias", 0)]
        assert torch.equal(weights["decoder.layers.0.pre_mlp_layernorm.bias"], norm)
        proj = tensors[Key("decoder.layers.self_attention.linear_proj.weight", 1)][
            :, 16 * rank : 16 * (rank + 1)
        ]
        assert torch.equal(weights["decoder.layers.1.self_attention.linear_proj.weight"], proj)
