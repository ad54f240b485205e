"""Adapters of routed experts equal ``peft``'s: losses of five steps, gradients, trained files, merged weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.runs import callback, read_tensors
from tests.families.test_experts import FAMILIES as MIXTURES
from tests.marks import accelerator_of, exhaustive, on_gpus
from tests.models import VOCAB_SIZE
from tests.parity.comparison import assert_same_gradients
from tests.parity.hugging_face import tensors_of, train_transformers
from tests.parity.sharding import Tensors
from tests.parity.test_lora import OPTIMIZER, TOKENS
from tests.parity.training import SEED, SEQ_LENGTH, Case, Layout, Outcome, loader_of, train_module
from tests.ranks import run_ranks

CASE = Case(labels="uneven", steps=5, optimizer=OPTIMIZER, clip=0.5)
RANK = 3
NUM_EXPERTS = 4
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LENGTH,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.0,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
}
_QWEN: dict[str, Any] = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS},
    "qwen3_moe": {**_QWEN, "head_dim": 8},
    # A shared expert, and a layer without experts, which on pp2 is the only one of its stage.
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    # Also its files on the hub hold all experts in one tensor: transposed, and gate and up take turns.
    "gpt_oss": {
        "num_local_experts": NUM_EXPERTS,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "dots1": _DEEPSEEK,
    "glm4_moe": {**_DEEPSEEK, "head_dim": 12},
    "deepseek_v3": {
        **_DEEPSEEK,
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
    "ernie4_5_moe": {
        "moe_k": 3,
        "moe_num_experts": 8,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "output_router_logits": False,
    },
    "olmoe": {"num_experts": 8, "num_hidden_layers": 4},
    **{
        name: {
            **MIXTURES[name][1],
            "num_experts": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
        for name in ("qwen3_next", "qwen3_5_moe_text")
    },
}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ALL = {"target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], **EXPERTS}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


def base_model(family: str, **changes: Any) -> Any:
    """A tiny model of a family with random weights, the same in every process."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(2)
    fields = {**FAMILIES, **OTHER_FAMILIES}[family]
    config = CONFIG_MAPPING[family](**{**_COMMON, **fields, **changes})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    return model


def save_initial(
    folder: str,
    family: str,
    targets: dict[str, Any],
    changes: dict[str, Any] | None = None,
) -> None:
    """Save a model, and an adapter of ``peft`` whose B is not zero, so that all gradients are nonzero."""
    from peft import LoraConfig, get_peft_model

    base = base_model(family, **(changes or {}))
    base.save_pretrained(f"{folder}/base")
    fields = {"r": RANK, **targets}
    config = LoraConfig(lora_alpha=5, init_lora_weights=False, task_type="CAUSAL_LM", **fields)
    get_peft_model(base, config).save_pretrained(f"{folder}/initial")


def save_per_expert(folder: str, family: str) -> None:
    """Save a model, and an adapter with names of each expert, as ``peft`` wrote them with transformers 4."""
    model = base_model(family)
    model.save_pretrained(f"{folder}/base")
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in load_file(f"{folder}/base/model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".experts." in name or "q_proj" in name:
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=generator) / columns
            b = torch.randn(rows, RANK, generator=generator) / RANK
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 5,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "base_model_name_or_path": f"{folder}/base",
    }
    Path(folder, "initial").mkdir()
    save_file(tensors, f"{folder}/initial/adapter_model.safetensors")
    Path(folder, "initial", "adapter_config.json").write_text(json.dumps(config))


def _train(case: Case, folder: str) -> tuple[Outcome, Tensor, Tensor]:
    """Train and save the saved adapter; return the outcome, and logits with and without adapters."""
    from lightning.pytorch import seed_everything

    from lightning_megatron import MegatronModule
    from lightning_megatron.engine.optimizer_options import OptimizerOptions
    from lightning_megatron.models.lora import adapters_off

    seed_everything(SEED, verbose=False)
    module: Any = MegatronModule(
        model=f"{folder}/base",
        pretrained=True,
        lora=f"{folder}/initial",
        lr=case.lr,
        optimizer=OptimizerOptions(**dict(case.optimizer)),
    )
    outcome = train_module(module, case, loader_of(case), collect=tensors_of)
    logits = module.logits(TOKENS)
    module.save_pretrained(f"{folder}/trained")
    module.save_pretrained(f"{folder}/merged", merge=True)
    assert torch.equal(module.logits(TOKENS), logits), "merging changed the adapters"
    with adapters_off(module.model_chunks):
        without = module.logits(TOKENS)
    return outcome, logits.cpu(), without.cpu()


def with_peft(folder: str, adapter: str) -> Any:
    """The saved model with a saved adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    return PeftModel.from_pretrained(model, f"{folder}/{adapter}", is_trainable=True)


def _train_with_peft(case: Case, folder: str) -> tuple[Outcome, Tensor, list[Tensor]]:
    """Outcome of ``peft``; logits of the base; and of the trained adapter, its merged weights, and ours."""
    from transformers import AutoModelForCausalLM

    outcome = train_transformers(case, with_peft(folder, "initial"), {})
    trained = with_peft(folder, "trained").eval()
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
    with torch.no_grad():
        with trained.disable_adapter():
            without = trained(input_ids=TOKENS).logits
        logits = [trained(input_ids=TOKENS).logits]
        for model in (trained.merge_and_unload(), merged):
            logits.append(model(input_ids=TOKENS).logits)
    return outcome, without, logits


def _by_expert(gradients: Tensors, num_experts: int) -> Tensors:
    """Gradients of ``peft``'s adapters by this package's names, which has matrices of each expert."""
    named: Tensors = {}
    has_two = any(".experts.base_layer.lora_A" in name for name in gradients)
    for name, gradient in gradients.items():
        name = name.replace(".default", "")
        module, _, kind = name.removesuffix(".weight").rpartition(".lora_")
        is_inner = module.endswith(".base_layer")
        if not module.removesuffix(".base_layer").endswith(".experts"):
            named[name] = gradient
            continue
        parameter = "down_proj" if has_two and not is_inner else "gate_up_proj"
        matrices = gradient.view(num_experts, -1, gradient.shape[1])
        if kind == "B":
            matrices = gradient.view(len(gradient), -1, num_experts).permute(2, 0, 1)
        for expert, matrix in enumerate(matrices):
            module = module.removesuffix(".base_layer")
            named[f"{module}.{parameter}.{expert}.lora_{kind}.weight"] = matrix
    return named


EP2 = Layout(ep=2, dp=2)
TP2 = Layout(tp=2, sequence_parallel=True)
PP2 = Layout(pp=2, num_microbatches=2)
TP2_EP2 = Layout(tp=2, ep=2, sequence_parallel=True)
GATHERED = (("moe_token_dispatcher_type", "allgather"),)
ONLY_UP = {"target_modules": [], "target_parameters": ["gate_up_proj"]}
CASES: dict[str, tuple[str, Layout, dict[str, Any] | None]] = {
    "qwen3_moe_ep2": ("qwen3_moe", EP2, {**ATTENTION, **EXPERTS}),
    "shared_and_dense_tp2": ("qwen2_moe", TP2, ALL),
    "files_per_expert_pp2": ("mixtral", PP2, None),
    "stacked_only_gate_and_up": ("gpt_oss", Layout(), ONLY_UP),
}
RARER_CASES: dict[str, tuple[str, Layout, dict[str, Any] | None]] = {
    "mixtral": ("mixtral", Layout(), {**ATTENTION, **EXPERTS}),
    "files_per_expert_ep2": ("qwen3_moe", EP2, None),
    "experts_of_one_stage": ("qwen2_moe", PP2, {"target_modules": [], **EXPERTS}),
    "only_experts_without_sharding": (
        "qwen3_moe",
        replace(EP2, distributed_optimizer=False),
        {"target_modules": [], **EXPERTS},
    ),
    "peft_fuses_targets": (
        "qwen3_moe",
        TP2_EP2,
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
    "stacked_tp2_ep2_recompute": (
        "gpt_oss",
        replace(TP2_EP2, recompute="full"),
        {**ATTENTION, **EXPERTS},
    ),
    "shared_and_dense_tp2_ep2_pp2": (
        "qwen2_moe",
        replace(TP2_EP2, pp=2, num_microbatches=2),
        ALL,
    ),
    "stacked_tp2_ep2_dp2": ("gpt_oss", replace(TP2_EP2, dp=2), {**ATTENTION, **EXPERTS}),
    **{
        family: (
            family,
            replace(TP2_EP2, pp=2, num_microbatches=2),
            {"target_modules": [], **EXPERTS},
        )
        for family in OTHER_FAMILIES
    },
    "gathered_in_one_of_two_stages": (
        "qwen2_moe",
        replace(
            TP2_EP2,
            pp=2,
            num_microbatches=2,
            recompute="selective",
            transformer_config_overrides=GATHERED,
        ),
        ALL,
    ),
    "stacked_gathered": (
        "gpt_oss",
        replace(EP2, transformer_config_overrides=GATHERED),
        {**ATTENTION, **EXPERTS},
    ),
    "cp2_ep2": ("qwen3_moe", Layout(cp=2, ep=2), {**ATTENTION, **EXPERTS}),
    "vpp2_ep2": (
        "olmoe",
        replace(EP2, pp=2, vpp=2, num_microbatches=2),
        {**ATTENTION, **EXPERTS},
    ),
    "selective_overlap": (
        "qwen3_moe",
        replace(EP2, recompute="selective", overlap_communication=True),
        {**ATTENTION, **EXPERTS},
    ),
}


@pytest.mark.parametrize(
    ("family", "layout", "targets"),
    [
        *(pytest.param(*each, id=name) for name, each in CASES.items()),
        *(exhaustive(*each, id=name) for name, each in RARER_CASES.items()),
        on_gpus(1, "qwen3_moe", Layout(), {**ATTENTION, **EXPERTS}, id="gpu"),
        on_gpus(2, "gpt_oss", EP2, {**ATTENTION, **EXPERTS}, id="ep2_on_gpus"),
    ],
)
def test_training_adapters_of_experts_equals_peft(
    family: str,
    layout: Layout,
    targets: dict[str, Any] | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder = str(tmp_path)
    case = replace(CASE, layout=layout, accelerator=accelerator_of(request))
    if targets is None:
        run_ranks(save_per_expert, 1, folder, family)
    else:
        run_ranks(save_initial, 1, folder, family, targets)
    ours, logits, without = run_ranks(_train, layout.world_size, case, folder)[0]
    ((theirs, of_base, of_our_files),) = run_ranks(
        _train_with_peft,
        1,
        case,
        folder,
    )
    for name, weight in ours.weights.items():
        if ".lora_" not in name:
            assert torch.equal(weight, ours.initial_weights[name]), f"{name} is not frozen"
    # The tolerances of tests/parity/comparison.py, for the same reasons.
    assert ours.losses == pytest.approx(theirs.losses, rel=1.5e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=5e-5)
    gradients = {name: each for name, each in ours.gradients.items() if ".lora_" in name}
    num_experts = 8 if family in OTHER_FAMILIES else NUM_EXPERTS
    assert_same_gradients(gradients, _by_expert(theirs.gradients, num_experts))
    torch.testing.assert_close(without, of_base, rtol=1e-5, atol=2e-5)
    for expected in of_our_files:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("rank", [RANK, 8])
def test_bf16_on_a_gpu_is_close_to_peft_in_fp32(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    targets = {**ATTENTION, **EXPERTS, "r": rank}
    run_ranks(save_initial, 1, folder, "qwen3_moe", targets)
    case = replace(CASE, accelerator="gpu", precision="bf16-mixed")
    ((ours, *_),) = run_ranks(_train, 1, case, folder)
    ((theirs, *_),) = run_ranks(_train_with_peft, 1, case, folder)
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-2)


def _train_and_save(
    case: Case,
    folder: str,
    half: str | None = None,
) -> tuple[list[float], Tensor, list[list[int]]]:
    """Train, from a checkpoint of half the steps if given; return losses, logits and generated tokens."""
    from lightning_megatron import LoRA, MegatronModule

    module: Any = MegatronModule(
        model=f"{folder}/base",
        pretrained=True,
        lora=LoRA(
            rank=2,
            targets=("q_proj",),
            target_parameters=("experts.gate_up_proj", "experts.down_proj"),
            ranks={"experts.gate_up_proj": 4},
        ),
        lr=0.05,
    )

    def save(trainer: Any, *_: Any) -> None:
        if half is None and trainer.global_step == 2:
            trainer.save_checkpoint(f"{folder}/half.ckpt")
            trainer.save_checkpoint(f"{folder}/adapters.ckpt", weights_only=True)

    saver = callback(on_train_batch_end=save)
    outcome = train_module(
        module,
        case,
        loader_of(case),
        ckpt_path=half,
        callbacks=[saver],
    )
    tokens = module.generate(TOKENS, max_new_tokens=4, eos_token_id=())
    return outcome.losses, module.logits(TOKENS).cpu(), tokens.tolist()


def test_checkpoint_goes_on_at_another_layout_and_is_converted(tmp_path: Path) -> None:
    folder = str(tmp_path)
    base_model("qwen2_moe").save_pretrained(tmp_path / "base")
    case = Case(steps=4)
    whole = run_ranks(_train_and_save, 2, replace(case, layout=EP2), folder)
    half = f"{folder}/half.ckpt"
    resumed = run_ranks(
        _train_and_save,
        2,
        replace(case, layout=TP2),
        folder,
        half,
    )
    losses, logits, tokens = whole[0]
    own_losses, own_logits, own_tokens = resumed[0]
    assert own_losses == pytest.approx(losses[2:], rel=1.5e-6)
    torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=2e-5)
    assert own_tokens == tokens
    names = read_tensors(tmp_path / "adapters.ckpt")
    experts = "decoder.layers.0.mlp.experts.experts."
    assert names[f"{experts}linear_fc1_lora.A"].shape == (NUM_EXPERTS, 4, 32)
    assert names[f"{experts}linear_fc2_lora.B"].shape == (NUM_EXPERTS, 32, 2)
    assert all(name.endswith(("_lora.A", "_lora.B")) for name in names)


def _train_with_dropout(
    case: Case,
    folder: str,
    dropout: float,
) -> list[float]:
    from lightning.pytorch import seed_everything

    from lightning_megatron import LoRA, MegatronModule

    seed_everything(SEED, verbose=False)
    module = MegatronModule(
        model=f"{folder}/base",
        pretrained=True,
        lora=LoRA(
            rank=2,
            targets=(),
            target_parameters=("experts.down_proj",),
            dropout=dropout,
        ),
        lr=0.05,
    )
    return train_module(module, case, loader_of(case)).losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [EP2, TP2], ids=str)
def test_dropout_drops_inputs_of_adapters_of_experts(layout: Layout, tmp_path: Path) -> None:
    base_model("qwen3_moe").save_pretrained(tmp_path / "base")
    case = Case(steps=3, layout=layout)
    recomputed = replace(case, layout=replace(layout, recompute="full"))
    runs = ((case, 0.5), (case, 0.5), (recomputed, 0.5), (case, 0.0))
    dropped, again, same, without = (
        run_ranks(_train_with_dropout, 2, each, str(tmp_path), dropout)[0] for each, dropout in runs
    )
    assert dropped == again
    assert dropped == pytest.approx(same, rel=1.5e-6)
    assert dropped[0] == without[0], "B is zero at first"
    assert dropped[-1] != without[-1]
