"""LoRA training equals ``peft`` on the Hugging Face model; adapters can be exchanged in both directions."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import exhaustive, on_gpus
from tests.parity.comparison import assert_same_gradients, assert_same_tensors
from tests.parity.hugging_face import hugging_face_model, tensors_of, train_hugging_face
from tests.parity.sharding import Tensors
from tests.parity.training import (
    FOUR_RANKS,
    MODELS,
    RECOMPUTED,
    TP2,
    Case,
    Layout,
    Outcome,
    join_outcomes,
    loader_of,
    module_of,
    train_module,
)
from tests.ranks import run_ranks

OPTIMIZER = (
    ("name", "adamw"),
    ("beta1", 0.8),
    ("beta2", 0.95),
    ("eps", 1e-3),
    ("weight_decay", 0.3),
)
LLAMA = Case(
    model="llama",
    labels="uneven",
    steps=5,
    optimizer=OPTIMIZER,
    clip=0.5,
)
GPT2 = replace(LLAMA, model="gpt2")
TOKENS = torch.arange(24).reshape(2, 12)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _save_random_adapter(
    case: Case,
    targets: list[str],
    folder: str,
) -> None:
    """Save an adapter with ``peft``; its B is not zero, so that all gradients are nonzero."""
    from peft import LoraConfig, get_peft_model
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(3)
    fields = {**MODELS[case.model], **dict(case.model_fields)}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(model, config).save_pretrained(folder)


def _train(case: Case, folder: str) -> tuple[Outcome, Tensor]:
    """Train the saved adapter, save it and the merged model, and return the outcome and final logits."""
    module = module_of(case, lora=f"{folder}/initial")
    outcome = train_module(module, case, loader_of(case), collect=tensors_of)
    logits = module.logits(TOKENS)
    module.save_pretrained(f"{folder}/trained")
    module.save_pretrained(f"{folder}/merged", merge=True)
    assert torch.equal(module.logits(TOKENS), logits), "merging changed the adapters"
    return outcome, logits.cpu()


def _add_adapter(model: Any, folder: str) -> None:
    from peft import PeftModel

    PeftModel.from_pretrained(model, folder, is_trainable=True)  # modifies the model in place


def _train_with_peft(
    case: Case,
    base: Tensors,
    folder: str,
) -> tuple[Outcome, Tensor, Tensor]:
    from transformers import AutoModelForCausalLM

    outcome = train_hugging_face(case, base, partial(_add_adapter, folder=f"{folder}/initial"))
    model = hugging_face_model(case, base)
    _add_adapter(model, f"{folder}/trained")
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
    with torch.no_grad():
        return outcome, model.eval()(input_ids=TOKENS).logits, merged(input_ids=TOKENS).logits


def _adapters(tensors: Tensors) -> Tensors:
    """Select adapter tensors, named as in ``peft``'s files."""
    named = {
        f"base_model.model.{name.replace('.default', '').removeprefix('base_model.model.')}": tensor
        for name, tensor in tensors.items()
        if ".lora_" in name
    }
    # A fused linear has a B of zeros for each matrix without an adapter.
    return {
        name: tensor for name, tensor in named.items() if name.replace("lora_B", "lora_A") in named
    }


CASES: dict[str, tuple[Case, Layout, list[str]]] = {
    "llama_tp2_pp2_sp": (LLAMA, FOUR_RANKS, ALL),
    "gpt2_tp2": (GPT2, TP2, ["c_attn", "mlp.c_proj"]),
    # Norms after linears; gate and up projections in one matrix.
    "glm4": (
        replace(LLAMA, model="glm4"),
        TP2,
        ["o_proj", "gate_up_proj", "down_proj"],
    ),
}
RARER_CASES: dict[str, tuple[Case, Layout, list[str]]] = {
    "some_vpp_recompute": (
        LLAMA, Layout(tp=2, pp=2, vpp=2, num_microbatches=2, recompute="full",), ["q_proj", "v_proj", "up_proj"]
    ),
    "some_dp_recompute": (
        LLAMA, Layout(tp=2, dp=2, recompute="selective", overlap_communication=True,), ["k_proj", "down_proj"]
    ),
    "mqa_tp2_sp": (
        replace(LLAMA, model_fields=(("num_key_value_heads", 1),)), replace(FOUR_RANKS, pp=1), ["q_proj", "v_proj"]
    ),
    "cp2": (LLAMA, Layout(cp=2, tp=2, sequence_parallel=True,), ALL),
}  # fmt: skip
ON_GPUS = (
    replace(LLAMA, accelerator="gpu"), Layout(tp=2, sequence_parallel=True, overlap_communication=True,), ALL
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "layout", "targets"),
    [
        *(pytest.param(*each, id=name) for name, each in CASES.items()),
        *(exhaustive(*each, id=name) for name, each in RARER_CASES.items()),
        on_gpus(2, *ON_GPUS, id="llama_on_gpus"),
    ],
)
def test_lora_training_equals_peft(
    case: Case, layout: Layout, targets: list[str], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    case = replace(case, layout=layout)
    run_ranks(_save_random_adapter, 1, case, targets, f"{folder}/initial")
    ranks = run_ranks(_train, case.layout.world_size, case, folder)
    ours, logits = ranks[0]
    base = {name: tensor for name, tensor in ours.initial_weights.items() if ".lora_" not in name}
    ((theirs, loaded, merged),) = run_ranks(
        _train_with_peft,
        1,
        case,
        base,
        folder,
    )
    # The tolerances of tests/parity/comparison.py, for the same reasons.
    assert ours.losses == pytest.approx(theirs.losses, rel=1.5e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=5e-5)
    assert_same_gradients(_adapters(ours.gradients), _adapters(theirs.gradients))
    assert_same_tensors(_adapters(ours.weights), _adapters(theirs.weights))
    assert_same_tensors(
        {name: ours.weights[name] for name in base},
        base,
        atol=0.0,
    )
    for theirs_logits in (
        loaded,
        merged,
    ):  # a few units in the last place of sums of 32 to 48 products
        torch.testing.assert_close(logits, theirs_logits, rtol=1e-5, atol=2e-5)


def _train_with_dropout(case: Case, dropout: float) -> Outcome:
    from lightning_megatron import LoRA

    return train_module(
        module_of(
            case,
            lora=LoRA(rank=3, alpha=30, dropout=dropout),
        ),
        case,
        loader_of(case),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [TP2, RECOMPUTED],
    ids=str,
)
def test_lora_dropout_is_equal_where_inputs_are_equal(layout: Layout) -> None:
    case = replace(LLAMA, layout=layout, steps=3)
    # ``join_outcomes`` compares replicated A and B bit by bit: they would diverge if dropout masks differed.
    with_dropout, again = (
        join_outcomes(run_ranks(_train_with_dropout, 2, case, 0.5)) for _ in range(2)
    )
    without = join_outcomes(run_ranks(_train_with_dropout, 2, case, 0.0))
    assert with_dropout.losses == again.losses
    assert with_dropout.losses[0] == without.losses[0], "B is zero at first"
    assert with_dropout.losses[-1] != without.losses[-1]
