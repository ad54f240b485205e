"""Files of adapters of routed experts: fused and of each expert, read and written, as ``peft`` reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_megatron import MegatronModule
from lightning_megatron.convert.peft import (
    AdapterSource,
    LoRA,
    check_expert_format,
    with_adapters,
)
from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.convert.directories import converted, tensors_in
from tests.marks import exhaustive
from tests.parity.test_lora import TOKENS
from tests.parity.test_lora_experts import (
    ATTENTION,
    EXPERTS,
    NUM_EXPERTS,
    RANK,
    save_initial,
    save_per_expert,
    with_peft,
)
from tests.ranks import run_ranks

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def _logits_and_merged(folder: str, *adapters: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Logits of adapters that ``peft`` loads, and the weights that it merges."""
    results = []
    for adapter in adapters:
        model = with_peft(folder, adapter).eval()
        with torch.no_grad():
            logits = model(input_ids=TOKENS).logits
            merged = model.merge_and_unload()
            merged.save_pretrained(f"{folder}/merged_{adapter}")
        results.append((logits, tensors_in(Path(folder, f"merged_{adapter}"))))
    return results


def _adapter(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(path / WEIGHTS), json.loads((path / CONFIG).read_text())


def _edited(source: Path, target: Path, **fields: Any) -> Path:
    """A copy of an adapter with other fields in its config; None removes one."""
    shutil.copytree(source, target)
    config = {**json.loads((target / CONFIG).read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (target / CONFIG).write_text(json.dumps(kept))
    return target


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model and an adapter of its attention and experts."""
    folder = tmp_path_factory.mktemp("qwen")
    run_ranks(
        save_initial,
        1,
        str(folder),
        "qwen3_moe",
        {**ATTENTION, **EXPERTS},
    )
    return folder


@pytest.mark.parametrize("family", ["mixtral", exhaustive("qwen3_moe")])
def test_peft_reads_both_forms_and_merges_what_we_merge(family: str, tmp_path: Path) -> None:
    targets = {**ATTENTION, **EXPERTS}
    run_ranks(save_initial, 1, str(tmp_path), family, targets)
    initial = tmp_path / "initial"
    base = tmp_path / "base"
    options: dict[str, Any] = {"to": "peft", "base": base}
    separate = converted(initial, tmp_path / "separate", expert_format="per_expert", **options)
    fused = converted(separate, tmp_path / "fused", **options)
    ((first, *others),) = run_ranks(
        _logits_and_merged, 1, str(tmp_path), "initial", "separate", "fused"
    )
    logits, weights = first
    for own_logits, own_weights in others:
        torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own_weights, weights, rtol=1e-5, atol=1e-6)
    ours = tensors_in(converted(fused, tmp_path / "ours", base=base))
    torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)
    # Gate and up have shared A in the first file: in the others each has a copy, so that the rank of both is doubled.
    names = [name for name in _adapter(separate)[0] if ".experts.3." in name and "lora_A" in name]
    assert len(names) == 2 * 3
    tensors, config = _adapter(fused)
    prefix = "base_model.model.model.layers.1.mlp.experts"
    assert tensors[f"{prefix}.base_layer.lora_A.weight"].shape == (NUM_EXPERTS * 2 * RANK, 32)
    assert config["rank_pattern"] == {"mlp.experts.gate_up_proj": 2 * RANK}
    assert config["alpha_pattern"] == {"mlp.experts.gate_up_proj": 10}
    assert (config["r"], config["lora_alpha"]) == (RANK, 5)


def test_files_of_each_expert_come_back_unchanged(tmp_path: Path) -> None:
    run_ranks(save_per_expert, 1, str(tmp_path), "mixtral")
    initial, config = _adapter(tmp_path / "initial")
    fused = converted(tmp_path / "initial", tmp_path / "fused", to="peft")
    separate = converted(fused, tmp_path / "separate", to="peft", expert_format="per_expert")
    tensors, own_config = _adapter(separate)
    assert tensors.keys() == initial.keys()
    assert all(torch.equal(tensors[name], initial[name]) for name in initial)
    assert own_config["target_modules"] == config["target_modules"] == ["q_proj", "w1", "w2", "w3"]
    assert (own_config["r"], own_config["lora_alpha"]) == (RANK, 5)


@pytest.mark.parametrize(
    "width",
    [
        pytest.param(32, id="square_down"),
        exhaustive(16, id="square_gate_and_up"),
        exhaustive(24, id="none_square"),
    ],
)
def test_transposed_adapters_of_older_peft_are_read(width: int, tmp_path: Path) -> None:
    run_ranks(
        save_initial,
        1,
        str(tmp_path),
        "qwen3_moe",
        EXPERTS | {"target_modules": []},
        {"moe_intermediate_size": width},
    )
    initial, _ = _adapter(tmp_path / "initial")
    older = _edited(tmp_path / "initial", tmp_path / "older", peft_version="0.18.1")
    swapped = {}
    for name, tensor in initial.items():
        # A [experts * r, in] and B [out, r * experts] of the transposed matrices.
        if "lora_A" in name:
            tensor = tensor.unflatten(0, (NUM_EXPERTS, RANK)).permute(2, 1, 0).flatten(1)
            swapped[name.replace("lora_A", "lora_B")] = tensor.contiguous()
        else:
            tensor = tensor.unflatten(1, (RANK, NUM_EXPERTS)).permute(2, 1, 0).flatten(0, 1)
            swapped[name.replace("lora_B", "lora_A")] = tensor.contiguous()
    save_file(swapped, older / WEIGHTS)
    options: dict[str, Any] = {"to": "peft", "base": tmp_path / "base"}
    tensors, config = _adapter(converted(older, tmp_path / "newer", **options))
    assert tensors.keys() == initial.keys()
    assert all(torch.equal(tensors[name], initial[name]) for name in initial)
    # What we write says how square matrices are stored.
    again, _ = _adapter(converted(tmp_path / "newer", tmp_path / "again", **options))
    assert all(torch.equal(again[name], initial[name]) for name in initial)
    assert config["peft_version"] == "0.19.1"


def test_options_of_an_adapter_name_its_parameters(qwen: Path) -> None:
    assert AdapterSource(qwen / "initial").lora(model_config(qwen / "base")) == LoRA(
        rank=RANK,
        alpha=5,
        targets=("self_attn.q_proj", "self_attn.v_proj"),
        target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    )


def _lora(**options: Any) -> LoRA:
    return LoRA(targets=("q_proj",), **options)


_MISTAKES: dict[str, tuple[str, LoRA, str]] = {
    "no such parameter": (
        "qwen3_moe",
        _lora(target_parameters=("experts.w1",)),
        "one of mlp.experts.gate_up_proj, mlp.experts.down_proj, got 'experts.w1'",
    ),
    "no experts": (
        "llama",
        _lora(target_parameters=("experts.down_proj",)),
        "expected a model with routed experts, got 'experts.down_proj' for llama",
    ),
    "no layer without experts": (
        "qwen3_moe",
        LoRA(targets=("gate_proj",)),
        "got 'gate_proj'; correct it, or name routed experts in target_parameters",
    ),
    "rank of no target": (
        "qwen3_moe",
        _lora(ranks={"experts.down_proj": 4}),
        "lora ranks: expected names of targets, got 'experts.down_proj'",
    ),
    "two ranks of fused matrices": (
        "qwen3_moe",
        LoRA(targets=("q_proj", "v_proj"), ranks={"v_proj": 4}),
        r"expected one rank for q_proj, v_proj, whose weights are one here, got \[4, 16\]",
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_targets_that_do_not_exist_are_refused(mistake: str) -> None:
    family, lora, message = _MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        with_adapters(model_config({"model_type": family}), lora)


_DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "other scale": (
        {"rank_pattern": {"experts.down_proj": 6}},
        "expected lora_alpha / r = 5 / 3 for all, got 5 / 6 for model.layers.0.mlp.experts.down_proj",
    ),
    "other rank": (
        {"r": 6, "lora_alpha": 10},
        "expected rank 6 of model.layers.0.mlp.experts.gate_up_proj, as in adapter_config.json, got weights of rank 3",
    ),
    "no table of ranks": ({"rank_pattern": [4]}, "is damaged"),
    "regular expression": (
        {"rank_pattern": {"(a+)+$": 6}},
        "expected numbers by ends of names in rank_pattern",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_what_is_no_plain_lora_is_refused(damage: str, qwen: Path, tmp_path: Path) -> None:
    fields, message = _DAMAGES[damage]
    changed = _edited(qwen / "initial", tmp_path / "changed", **fields)
    with pytest.raises(CheckpointError, match=message):
        AdapterSource(changed).lora(model_config(qwen / "base"))


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "^q_proj",
        "q.proj",
        "_proj",
        ".*_proj",
        r".*\.q_proj$",
        r"self_attn\.q_proj",
        "layers.0.self_attn.q_proj",
        r"^model\.layers.0.self_attn.q_proj",
        r"\w_proj",
        "(q|v)_proj",
        "experts.down_proj",
        "gate_up_proj",
        "k_proj",
    ],
)
def test_pattern_means_the_same_modules_as_to_peft(
    pattern: str, qwen: Path, tmp_path: Path
) -> None:
    from peft.utils.other import get_pattern_key

    source = AdapterSource(_edited(qwen / "initial", tmp_path / "it", alpha_pattern={pattern: 10}))
    names = [f"self_attn.{name}" for name in ATTENTION["target_modules"]]
    names += EXPERTS["target_parameters"]
    modules = [f"model.layers.{layer}.{name}" for layer in range(2) for name in names]
    model = model_config(qwen / "base")
    if any(get_pattern_key([pattern], module) == pattern for module in modules):
        with pytest.raises(CheckpointError, match="got 10 / 3 for|expected numbers by ends of na"):
            source.lora(model)
    else:
        source.lora(model)


def test_adapters_of_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    run_ranks(save_initial, 1, str(tmp_path), "mixtral", EXPERTS)
    tensors = load_file(tmp_path / "initial" / WEIGHTS)
    shutil.rmtree(tmp_path / "initial")
    run_ranks(save_per_expert, 1, str(tmp_path), "mixtral")
    path = tmp_path / "initial" / WEIGHTS
    save_file(load_file(path) | tensors, path)
    with pytest.raises(CheckpointError, match="expected one tensor .*experts.*, got two"):
        AdapterSource(tmp_path / "initial").lora(model_config(tmp_path / "base"))


def test_adapter_of_experts_is_refused_for_a_model_without_them(qwen: Path) -> None:
    dense = model_config({"model_type": "llama"})
    with pytest.raises(
        CheckpointError, match=r"of llama, which has no routed experts, got one of .*experts"
    ):
        AdapterSource(qwen / "initial").lora(dense)


def test_adapter_of_one_parameter_must_say_which(tmp_path: Path) -> None:
    only_down = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    run_ranks(save_initial, 1, str(tmp_path), "qwen3_moe", only_down)
    model = model_config(tmp_path / "base")
    lora = AdapterSource(tmp_path / "initial").lora(model)
    assert lora.targets == ()
    assert lora.target_parameters == ("mlp.experts.down_proj",)
    changed = _edited(tmp_path / "initial", tmp_path / "changed", target_parameters=None)
    with pytest.raises(CheckpointError, match="one of gate_up_proj and down_proj in target_param"):
        AdapterSource(changed).lora(model)


def test_file_with_gate_alone_is_refused(tmp_path: Path) -> None:
    run_ranks(save_per_expert, 1, str(tmp_path), "qwen3_moe")
    path = tmp_path / "initial" / WEIGHTS
    tensors = load_file(path)
    save_file({name: each for name, each in tensors.items() if "up_proj" not in name}, path)
    with pytest.raises(CheckpointError, match="expected adapters of gate_proj and up_proj in each"):
        AdapterSource(tmp_path / "initial").lora(model_config(tmp_path / "base"))


def test_form_that_would_do_nothing_or_does_not_exist_is_refused(tmp_path: Path) -> None:
    lora = LoRA(targets=("q_proj",), target_parameters=("experts.down_proj",))
    stacked = with_adapters(model_config({"model_type": "gpt_oss"}), lora)
    with pytest.raises(ConfigError, match="got gpt_oss, whose experts are one parameter"):
        check_expert_format(stacked, "per_expert")
    with pytest.raises(ConfigError, match="expert_format"):
        check_expert_format(stacked, "separate")
    options: dict[str, Any] = {"expert_format": "per_expert"}
    with pytest.raises(ConfigError, match="expert_format=per_expert would do nothing with to=hf"):
        converted(tmp_path / "adapter", tmp_path / "out", **options)
    module = MegatronModule(model={"model_type": "qwen3_moe"}, lora=lora)
    with pytest.raises(ConfigError, match="expected adapters of routed experts, got none"):
        module.save_pretrained(tmp_path / "out", merge=True, **options)
    with pytest.raises(ConfigError, match="there is no model to save"):
        module.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
