"""Mixtures of experts equal Hugging Face: logits, loss with the auxiliary loss, gradients and saved weights."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GptOssConfig

from lightning_megatron.convert.registry import (
    config_for_task,
    config_object,
    differences,
    model_config,
)
from lightning_megatron.engine.overrides import Overrides
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.checks import check_model
from lightning_megatron.models.config import with_variant
from tests.convert.directories import converted
from tests.families.parity import check_family, padded_sentences, pretrained_module, tiny_model
from tests.families.test_gpts import LIKE_LLAMA, LINEAR_ATTENTION
from tests.models import VOCAB_SIZE
from tests.parity.training import FOUR_RANKS, INTERLEAVED, RECOMPUTED, Case, Layout, trainer_of
from tests.ranks import run_ranks

_LIKE_LLAMA = {**LIKE_LLAMA, "num_experts_per_tok": 2, "output_router_logits": True}
_QWEN = {**_LIKE_LLAMA, "num_experts": 6, "moe_intermediate_size": 20, "router_aux_loss_coef": 0.5}
_DEEPSEEK = {
    **LIKE_LLAMA,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_GPT_OSS_SWIGLU: dict[str, Any] = {}
if hasattr(GptOssConfig(), "swiglu_limit"):
    # Older transformers ignore them: their model has constants.
    _GPT_OSS_SWIGLU = {"swiglu_limit": 1.5, "swiglu_alpha": 1.3}
_LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**_LIKE_LLAMA, "num_local_experts": 4, "router_aux_loss_coef": 0.2}),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN, "shared_expert_intermediate_size": 28}),
    "olmoe": ("Olmoe", {**_LIKE_LLAMA, "num_experts": 4, "router_aux_loss_coef": 0.1}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_QWEN, "head_dim": 12, "max_window_layers": 4, "norm_topk_prob": True},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_QWEN, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 28},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {
            **{name: value for name, value in _QWEN.items() if name != "intermediate_size"},
            **LINEAR_ATTENTION,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "dots1": ("Dots1", {**_DEEPSEEK, "first_k_dense_replace": 1}),
    "glm4_moe": ("Glm4Moe", {**_DEEPSEEK, "head_dim": 12, "use_qk_norm": True}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "num_key_value_heads": LIKE_LLAMA["num_attention_heads"],
            "first_k_dense_replace": 1,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "rope_parameters": _LATENT_YARN,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            **LIKE_LLAMA,
            "head_dim": 12,
            "moe_k": 3,
            "moe_num_experts": 8,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_LIKE_LLAMA,
            "head_dim": 12,
            "num_local_experts": 4,
            "router_aux_loss_coef": 0.2,
            "sliding_window": 5,
            **_GPT_OSS_SWIGLU,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "truncate": False,
            },
        },
    ),
}
"""Names of transformers' classes, and fields of a tiny model."""
_MOONLIGHT: dict[str, Any] = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": None,
    "rms_norm_eps": 1e-5,
}
"""Fields of DeepSeek-V3 in which Moonlight differs."""


def mixture(family: str, **changes: Any) -> Any:
    """Create a tiny model of a family."""
    import transformers

    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB_SIZE,
        **{**fields, **changes},
    )
    return tiny_model(transformers.AutoModelForCausalLM, config)


def _per_layer_and_microbatch(original: Any, layout: Layout) -> Any:
    """Return transformers' auxiliary loss applied to each layer and microbatch, averaged as documented."""

    def load_balancing_loss(
        gate_logits: Any, num_experts: int, top_k: int, attention_mask: torch.Tensor
    ) -> Any:
        rows, length = attention_mask.shape
        total = torch.zeros(())
        for rank in range(layout.dp):
            sampler: DistributedSampler[int] = DistributedSampler(
                range(rows),  # type: ignore[arg-type]
                num_replicas=layout.dp,
                rank=rank,
            )
            indices = torch.tensor(list(sampler))
            for part in indices.chunk(layout.num_microbatches):
                mask = attention_mask[part]
                for logits in gate_logits:
                    router_logits = logits.view(rows, length, -1)[part].flatten(0, 1)
                    total = (
                        total + original((router_logits,), num_experts, top_k, mask) * mask.sum()
                    )
        return total / attention_mask.sum() / len(gate_logits)

    return load_balancing_loss


CASES: tuple[tuple[str, dict[str, Any], Layout], ...] = (
    ("mixtral", {}, Layout()),
    ("mixtral", {"sliding_window": 5}, FOUR_RANKS),
    # One layer is recomputed, and the load of all leaves padding out.
    ("qwen2_moe", {}, replace(RECOMPUTED, recompute_method="block")),
    (
        "qwen3_moe",
        {"tie_word_embeddings": True},
        Layout(
            ep=2,
            tp=2,
            dp=2,
            sequence_parallel=True,
        ),
    ),
    (
        "olmoe",
        {},
        Layout(ep=2, tp=2, sequence_parallel=True),
    ),
    ("qwen3_next", {"mlp_only_layers": [1]}, FOUR_RANKS),
    (
        "qwen3_5_moe_text",
        {},
        Layout(
            ep=2,
            tp=2,
            sequence_parallel=True,
        ),
    ),
    ("dots1", {}, FOUR_RANKS),
    ("glm4_moe", {"attention_bias": True}, Layout(ep=2, dp=2)),
    ("deepseek_v3", {}, FOUR_RANKS),
    ("deepseek_v3", _MOONLIGHT, Layout(ep=2, cp=2)),
    ("ernie4_5_moe", {}, FOUR_RANKS),
    ("gpt_oss", {}, FOUR_RANKS),
    ("gpt_oss", {}, Layout(ep=2, cp=2)),
)
RARER_CASES: tuple[tuple[str, dict[str, Any], Layout], ...] = (
    (
        "mixtral",
        {},
        Layout(ep=2, dp=2, recompute="selective"),
    ),
    ("qwen3_moe", {}, Layout(ep=2, cp=2)),
    ("deepseek_v3", {"attention_bias": True}, Layout()),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_norm_min": 0.6}, Layout(ep=2, cp=2)),
    ("gpt_oss", {}, Layout()),
    (
        "qwen2_moe",
        {"norm_topk_prob": True, "decoder_sparse_step": 2},
        Layout(ep=2, dp=2, pp=2, num_microbatches=2),
    ),
    ("qwen3_next", {}, Layout()),
    (
        "qwen3_moe",
        {},
        Layout(
            ep=2,
            tp=2,
            sequence_parallel=True,
            recompute="selective",
        ),
    ),
    (
        "qwen3_moe",
        {"mlp_only_layers": [0, 3], "decoder_sparse_step": 1},
        INTERLEAVED,
    ),
    ("dots1", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}, Layout()),
    ("dots1", {"sliding_window": 5, "max_window_layers": 2}, Layout(tp=2, sequence_parallel=True)),
    ("dots1", {}, Layout(ep=2, cp=2)),
    ("glm4_moe", {"use_qk_norm": False}, FOUR_RANKS),
    ("glm4_moe", {}, Layout(tp=2, sequence_parallel=True)),
    (
        "deepseek_v3",
        {},
        Layout(
            tp=2,
            sequence_parallel=True,
            recompute="selective",
        ),
    ),
    (
        "deepseek_v3",
        {"rope_interleave": False},
        Layout(
            ep=2,
            dp=2,
            recompute="full",
        ),
    ),
    ("deepseek_v3", {}, Layout(cp=2, cp_comm_type="all_gather")),
    ("deepseek_v3", {"tie_word_embeddings": True}, INTERLEAVED),
    (
        "deepseek_v3",
        {},
        Layout(
            recompute="selective",
            transformer_config_overrides=(("recompute_modules", ["core_attn"]),),
        ),
    ),
    ("deepseek_v3", {"first_k_dense_replace": 4}, Layout(tp=2)),  # no sequence parallelism
    (
        "deepseek_v3",
        {**_MOONLIGHT, "attention_bias": True},
        Layout(ep=2, tp=2, sequence_parallel=True),
    ),
    ("ernie4_5_moe", {}, Layout()),
    ("ernie4_5_moe", {"tie_word_embeddings": False}, Layout(tp=2, sequence_parallel=True)),
    (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0},
        Layout(
            ep=2,
            dp=2,
            recompute="selective",
        ),
    ),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 2}, INTERLEAVED),
    (
        "gpt_oss",
        {"num_key_value_heads": 1},
        Layout(
            tp=2,
            sequence_parallel=True,
            recompute="full",
        ),
    ),
    (
        "gpt_oss",
        {},
        Layout(
            ep=2,
            dp=2,
            recompute="selective",
        ),
    ),
    (
        "gpt_oss",
        {},
        Layout(
            ep=2,
            dp=2,
            recompute="selective",
            transformer_config_overrides=(("moe_token_dispatcher_type", "allgather"),),
        ),
    ),
    ("gpt_oss", {"num_key_value_heads": 1}, Layout(cp=2)),  # keys are gathered
    (
        "gpt_oss",
        {"attention_bias": False, "tie_word_embeddings": True},
        Layout(pp=2, vpp=2, num_microbatches=2),
    ),
    (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 4, "rope_parameters": None},
        Layout(ep=2, tp=2, sequence_parallel=True),
    ),
    (
        "qwen3_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        Layout(dp=2, distributed_optimizer=False),
    ),
)


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        pytest.param(*case, id=f"{case[0]} {case[1]}-{case[2]}", marks=marks)
        for cases, marks in ((CASES, ()), (RARER_CASES, pytest.mark.exhaustive))
        for case in cases
    ],
)
def test_mixture_of_experts_equals_hugging_face(
    family: str,
    changes: dict[str, Any],
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = family.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    original = getattr(modeling, "load_balancing_loss_func", None)
    if original is not None:
        balanced = _per_layer_and_microbatch(original, layout)
        monkeypatch.setattr(modeling, "load_balancing_loss_func", balanced)
    check_family(mixture(family, **changes), layout, padded_sentences())


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, FOUR_RANKS),
        pytest.param(_MOONLIGHT, Layout(), marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_of_latent_attention_equal_peft(changes: dict[str, Any], layout: Layout) -> None:
    model = mixture("deepseek_v3", **changes)
    check_family(model, layout, padded_sentences(), adapters=True)


# ---- files -----------------------------------------------------------------------------------------------------------


def _export_all(folder: str, families: list[str]) -> None:
    layout = Layout(ep=2, dp=2)
    for family in families:
        module = pretrained_module(f"{folder}/{family}/in_one_tensor")
        loader: DataLoader[Any] = DataLoader(padded_sentences(), batch_size=2)  # type: ignore[arg-type]
        trainer_of(Case(layout=layout)).validate(module, loader, verbose=False)
        module.save_pretrained(f"{folder}/{family}/exported")


def test_experts_in_one_tensor_are_read_and_saved_as_on_the_hub(tmp_path: Path) -> None:
    for family in FAMILIES:
        fields: dict[str, Any] = {"num_hidden_layers": 2}
        if "layer_types" in FAMILIES[family][1]:
            fields["layer_types"] = FAMILIES[family][1]["layer_types"][:2]
        model = mixture(family, **fields)
        model.save_pretrained(tmp_path / family / "in_one_tensor", save_original_format=False)
        model.save_pretrained(tmp_path / family / "on_the_hub")
    run_ranks(_export_all, 2, str(tmp_path), list(FAMILIES))
    for family in FAMILIES:
        stacked, expected, exported = (
            load_file(tmp_path / family / name / "model.safetensors")
            for name in ("in_one_tensor", "on_the_hub", "exported")
        )
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked), family
        assert exported.keys() == expected.keys(), family
        for name, tensor in expected.items():
            assert exported[name].equal(tensor), f"{family} {name}"


def _stacked_files(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = mixture("mixtral")
    model.save_pretrained(folder, save_original_format=False)
    return folder / "model.safetensors", load_file(folder / "model.safetensors")


_GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor[:, :-1], "'model.layers.0.mlp.experts.gate_up_proj' is not part"),
        (lambda tensor: tensor[:-1], "'model.layers.0.mlp.experts.gate_up_proj' is not part"),
        (
            lambda tensor: tensor[:, :, :-1],
            r"experts.3.w3.weight' has the shape \[48, 31\], not \[48, 32\]",
        ),
    ],
    ids=["odd rows", "fewer experts", "fewer columns"],
)
def test_experts_of_another_shape_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    file, tensors = _stacked_files(tmp_path / "hf")
    tensors[_GATE_UP] = change(tensors[_GATE_UP]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path / "hf", tmp_path / "kept", to="megatron")


def test_files_with_both_forms_of_experts_are_refused(tmp_path: Path) -> None:
    file, tensors = _stacked_files(tmp_path / "hf")
    gate = tensors[_GATE_UP][0, :48].clone()
    tensors["model.layers.0.block_sparse_moe.experts.0.w1.weight"] = gate
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="gate_up_proj' is not part of the model"):
        converted(tmp_path / "hf", tmp_path / "kept", to="megatron")


def _loss_with_a_bias(directory: str) -> float:
    bias = (("moe_router_score_function", "sigmoid"), ("moe_router_enable_expert_bias", True))
    case = Case(layout=Layout(transformer_config_overrides=bias))
    loader: DataLoader[Any] = DataLoader(padded_sentences(), batch_size=4)  # type: ignore[arg-type]
    (logged,) = trainer_of(case).validate(
        pretrained_module(directory),
        loader,
        verbose=False,
    )
    return float(logged["val_loss"])


def test_files_without_expert_bias_load_into_model_with_one(tmp_path: Path) -> None:
    mixture("mixtral").save_pretrained(tmp_path)
    assert 0 < run_ranks(_loss_with_a_bias, 1, str(tmp_path))[0] < 20


def test_unsupported_values_of_gpt_oss_are_refused() -> None:
    fields = {"model_type": "gpt_oss", "num_hidden_layers": 2}
    for changes, message in (
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0: expected a positive number"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantization_config of the gpt_oss config \(fp8\)",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            model_config({**fields, **changes})
    with pytest.raises(ConfigError, match="position_embedding_type='alibi': expected 'rotary'"):
        with_variant(model_config(fields), "alibi", None)


def test_selection_bias_of_a_config_is_not_overridden() -> None:
    model = model_config({"model_type": "ernie4_5_moe", "num_hidden_layers": 2})
    settings = EngineSettings(
        parallel=ParallelConfig(),
        params_dtype=torch.float32,
        device=torch.device("cpu"),
        overrides=Overrides(transformer={"moe_router_enable_expert_bias": True}),
    )
    with pytest.raises(ConfigError, match="is given by the ernie4_5_moe config"):
        check_model(model, settings)


def test_unsupported_values_of_deepseek_v3_are_refused() -> None:
    fields = {"model_type": "deepseek_v3", "num_hidden_layers": 4}
    for changes, message in (
        ({"scoring_func": "softmax"}, "scoring_func='softmax' of this deepseek_v3 config"),
        ({"topk_method": "greedy"}, "topk_method='greedy' of this deepseek_v3 config"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 of this deepseek_v3 config"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8: expected num_attention_heads=128"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be at least 1"),
        ({"qk_rope_head_dim": 7}, "even rotary dimension"),
    ):
        with pytest.raises(ConfigError, match=message):
            model_config({**fields, **changes})
    for position, heads in (("alibi", None), (None, "multiquery")):
        with pytest.raises(ConfigError, match="latent"):
            with_variant(model_config(fields), position, heads)


_YARN_OF_KIMI = {
    "type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_KIMI: dict[str, Any] = {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": _YARN_OF_KIMI,
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Fields as in the published config of Kimi K2."""


def test_kimi_k2_is_a_deepseek_v3_with_its_scale_of_scores() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    hf_config = config_object(_KIMI)
    assert hf_config.model_type == "deepseek_v3"
    model = model_config(_KIMI)
    assert model.family == "deepseek_v3"
    with torch.device("meta"):
        attention = DeepseekV3Attention(hf_config, 0)
    assert model.softmax_scale == attention.scaling != attention.qk_head_dim**-0.5
    assert config_for_task(hf_config, model).model_type == "deepseek_v3"


def test_model_of_older_checkpoint_has_fewer_fields_of_experts() -> None:
    experts = {"num_experts": 4, "topk": 2}
    newer = {**experts, "add_bias": False}
    assert differences({"experts": experts}, {"experts": newer}) == []
    assert differences({"experts": experts}, {"experts": {**newer, "topk": 3}}) == ["experts"]
    assert differences({"experts": experts}, {"experts": None}) == ["experts"]
