"""DPO equals its formula on the logits of transformers: losses, gradients, rewards and weights, in any layout."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.families.parity import Rows, pretrained_module
from tests.families.test_experts import FAMILIES as MIXTURES
from tests.families.test_experts import mixture
from tests.families.test_gpts import gpt_model
from tests.marks import accelerator_of, exhaustive, on_gpus
from tests.models import VOCAB_SIZE
from tests.parity.comparison import assert_same_tensors, relative_error
from tests.parity.hugging_face import tensors_of
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2_DP2,
    RECOMPUTED,
    TP2_SP,
    Case,
    Layout,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

STEPS = 5
LR = 5e-3
# Step by step, of losses, gradient norms and logged values.
_RTOL = 1e-5
# Rewards and margins are differences of sums of about 50 log-probabilities. A GPU adds in another order.
_ATOL = {"cpu": 2e-6, "gpu": 1e-4}
_GRADIENT_ERROR = {"cpu": _RTOL, "gpu": 1e-4}
LENGTHS = {"chosen": (16, 9, 12, 14), "rejected": (12, 11, 6, 8)}
PROMPTS = (5, 3, 4, 7)
_CP = Layout(cp=2, cp_comm_type="a2a")
_CP_TP = Layout(cp=2, cp_comm_type="all_gather", tp=2, sequence_parallel=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of ``DPOTrainStep``."""

    beta: float = 0.1
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    average_log_probs: bool = False


SIGMOID = Options(beta=0.3, label_smoothing=0.1)
IPO = Options(beta=0.2, loss="ipo", average_log_probs=True)
HINGE = Options(beta=0.4, loss="hinge")


def preference_rows() -> Rows:
    """Four pairs with padding on the right; the rejected answers are padded to 12 tokens, the chosen ones to 16."""
    generator = torch.Generator().manual_seed(5)
    rows: Rows = [{} for _ in PROMPTS]
    for answer, lengths in LENGTHS.items():
        width = max(lengths)
        tokens = torch.randint(1, VOCAB_SIZE, (len(rows), width), generator=generator)
        for row, own, length, prompt in zip(rows, tokens, lengths, PROMPTS, strict=True):
            places = torch.arange(width)
            is_answer = (places >= prompt) & (places < length)
            row[f"{answer}_input_ids"] = own
            row[f"{answer}_attention_mask"] = (places < length).long()
            row[f"{answer}_labels"] = own.masked_fill(~is_answer, -100)
    return rows


def tiny(family: str) -> Any:
    """A tiny transformers model of its own."""
    if family in MIXTURES:
        return mixture(family, router_aux_loss_coef=0.0)
    return copy.deepcopy(gpt_model(family, {}))


# ---- the formula ----------------------------------------------------------------------------------------------------


def log_probabilities(hf_model: Any, rows: Rows) -> Tensor:
    """[pairs, 2]: log-probability of each answer, by the logits of a transformers model."""
    values = []
    for row in rows:
        for answer in ("chosen", "rejected"):
            logits = hf_model(
                input_ids=row[f"{answer}_input_ids"][None],
                attention_mask=row[f"{answer}_attention_mask"][None],
            ).logits[0, :-1]
            labels = row[f"{answer}_labels"][1:]
            is_target = labels != -100
            targets = labels[is_target]
            chosen = torch.log_softmax(logits[is_target], dim=-1)
            values.append(chosen[torch.arange(len(targets)), targets].sum())
    return torch.stack(values).view(-1, 2)


def _formula(
    logps: Tensor,
    reference: Tensor,
    rows: Rows,
    options: Options,
) -> dict[str, Tensor]:
    """Means over pairs of everything that is logged."""
    rewards = logps - reference
    if options.average_log_probs:
        counts = [
            [(row[f"{name}_labels"][1:] != -100).sum() for name in ("chosen", "rejected")]
            for row in rows
        ]
        rewards = rewards / torch.tensor(counts)
    margin = rewards[:, 0] - rewards[:, 1]
    scaled = options.beta * margin
    smoothing = options.label_smoothing
    losses = {
        "sigmoid": -(1 - smoothing) * torch.sigmoid(scaled).log()
        - smoothing * torch.sigmoid(-scaled).log(),
        "ipo": (margin - 0.5 / options.beta) ** 2,
        "hinge": (1 - scaled).clamp(min=0),
    }
    return {
        "loss": losses[options.loss].mean(),
        "rewards_chosen": options.beta * rewards[:, 0].mean(),
        "rewards_rejected": options.beta * rewards[:, 1].mean(),
        "margin": scaled.mean(),
        "accuracy": (margin > 0).float().mean(),
    }


def _train_by_formula(
    hf_model: Any,
    reference: Tensor,
    rows: Rows,
    options: Options,
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
    """Logged values and gradients of each step of the transformers model, which is trained in place."""
    parameters = {name: each for name, each in hf_model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=LR,
        eps=1e-3,
        weight_decay=0.0,
    )
    logged = []
    gradients = []
    for _ in range(STEPS):
        values = _formula(log_probabilities(hf_model, rows), reference, rows, options)
        optimizer.zero_grad()
        values["loss"].backward()
        gradients.append({name: each.grad.clone() for name, each in parameters.items()})
        optimizer.step()
        logged.append({name: value.item() for name, value in values.items()})
    return logged, gradients


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _train(
    directory: str,
    case: Case,
    rows: Rows,
    options: Options,
    lora: str | None,
) -> dict[str, Any]:
    """Train on this rank; validate three pairs, which divide neither into microbatches nor over replicas."""
    from lightning_megatron import DPOTrainStep
    from lightning_megatron.engine.optimizer_options import OptimizerOptions
    from tests.checkpoint.runs import callback
    from tests.parity.sharding import gradients_as_weights

    layout = case.layout
    logged: list[dict[str, float]] = []
    gradients: list[dict[str, Tensor]] = []

    def step(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with gradients_as_weights(pl_module):
            gradients.append(tensors_of(pl_module))

    def end(trainer: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        logged.append({name: value.item() for name, value in metrics.items()})

    module = pretrained_module(
        directory,
        lora=lora,
        train_step=DPOTrainStep(**vars(options)),
        lr=LR,
        optimizer=OptimizerOptions(eps=1e-3, weight_decay=0.0),
    )
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows) // layout.dp)  # type: ignore[arg-type]
    recorder = callback(on_before_optimizer_step=step, on_train_batch_end=end)
    run = train_module(module, case, loader, collect=tensors_of, callbacks=[recorder])
    odd: DataLoader[Any] = DataLoader(rows[:3], batch_size=3 if layout.dp == 1 else 2)  # type: ignore[arg-type]
    (validated,) = trainer_of(case).validate(module, odd, verbose=False)
    return {
        "logged": logged,
        "gradients": gradients,
        "weights": run.weights,
        "validated": dict(validated),
    }


def compare_steps(
    ranks: list[dict[str, Any]],
    logged: list[dict[str, float]],
    gradients: list[dict[str, Tensor]],
    rename: Any = str,
    accelerator: Literal["cpu", "gpu"] = "cpu",
) -> None:
    """Assert equal logged values on every rank, and gradients on rank 0, in each step."""
    for rank in ranks:
        for ours, theirs in zip(rank["logged"], logged, strict=True):
            for name, value in theirs.items():
                assert ours[f"train_{name}"] == pytest.approx(
                    value, rel=_RTOL, abs=_ATOL[accelerator]
                ), name
    for ours, expected in zip(ranks[0]["gradients"], gradients, strict=True):
        total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        for name, gradient in expected.items():
            error = (ours[rename(name)] - gradient).norm()
            assert error <= _GRADIENT_ERROR[accelerator] * total, (
                name,
                relative_error(ours[rename(name)], gradient),
            )


_CASES = [
    pytest.param("llama", FOUR_RANKS, SIGMOID, id="sigmoid-tp2-pp2-sp"),
]
_RARER_CASES = [
    on_gpus(1, "llama", Layout(), SIGMOID, id="sigmoid-gpu"),
    on_gpus(1, "qwen3_moe", Layout(), IPO, id="experts-ipo-gpu"),
    exhaustive("llama", _CP_TP, IPO, id="ipo-cp2-tp2-sp"),
    exhaustive("llama", Layout(), SIGMOID, id="one_process"),
    exhaustive("llama", TP2_SP, HINGE, id="hinge-tp2-sp"),
    exhaustive("llama", INTERLEAVED, IPO, id="ipo-vpp"),
    exhaustive("llama", PP2_DP2, HINGE, id="hinge-pp2-dp2"),
    exhaustive("llama", _CP, SIGMOID, id="sigmoid-cp2"),
    exhaustive("llama", RECOMPUTED, SIGMOID, id="recomputed"),
    exhaustive("gpt2", FOUR_RANKS, SIGMOID, id="gpt2"),
    exhaustive("qwen3_moe", replace(TP2_SP, ep=2), SIGMOID, id="experts"),
    exhaustive("qwen3_moe", Layout(dp=2, ep=2), SIGMOID, id="experts-dp2"),
]


@pytest.mark.parametrize(("family", "layout", "options"), [*_CASES, *_RARER_CASES])
def test_dpo_equals_the_formula_on_transformers_logits(
    family: str,
    layout: Layout,
    options: Options,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    hf_model = tiny(family)
    hf_model.save_pretrained(tmp_path)
    reference_model = copy.deepcopy(hf_model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in reference_model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        rows = preference_rows()
        reference = log_probabilities(reference_model, rows)
    with_references = [
        {**row, "reference_chosen_logps": chosen, "reference_rejected_logps": rejected}
        for row, (chosen, rejected) in zip(rows, reference, strict=True)
    ]
    case = Case(layout=layout, steps=STEPS, accelerator=accelerator_of(request))
    ranks = run_ranks(
        _train, layout.world_size, str(tmp_path), case, with_references, options, None
    )
    logged, gradients = _train_by_formula(hf_model, reference, rows, options)
    compare_steps(ranks, logged, saved_names(hf_model, gradients), accelerator=case.accelerator)
    expected = _formula(
        log_probabilities(hf_model, rows[:3]).detach(), reference[:3], rows[:3], options
    )
    for rank in ranks:
        for name, value in expected.items():
            assert rank["validated"][f"val_{name}"] == pytest.approx(
                value.item(), rel=1e-4, abs=max(1e-5, _ATOL[case.accelerator])
            )


def saved_names(hf_model: Any, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Gradients by name in saved files, which have one tensor per expert."""
    from transformers.core_model_loading import revert_weight_conversion

    return [revert_weight_conversion(hf_model, each) for each in gradients]


@pytest.mark.parametrize(
    "layout",
    [
        FOUR_RANKS,
        *(exhaustive(each) for each in (Layout(), INTERLEAVED, PP2_DP2, _CP_TP)),
    ],
    ids=str,
)
def test_reference_of_adapters_is_the_model_without_them(layout: Layout, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    hf_model = tiny("llama")
    hf_model.save_pretrained(tmp_path / "base")
    rows = preference_rows()
    with torch.no_grad():
        reference = log_probabilities(hf_model, rows)
    torch.manual_seed(4)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    adapted = get_peft_model(hf_model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    case = Case(layout=layout, steps=STEPS)
    ranks = run_ranks(
        _train,
        layout.world_size,
        str(tmp_path / "base"),
        case,
        rows,
        SIGMOID,
        str(tmp_path / "adapter"),
    )
    logged, gradients = _train_by_formula(adapted, reference, rows, SIGMOID)

    def rename(name: str) -> str:
        return name.replace(".default", "")

    compare_steps(ranks, logged, gradients, rename)
    weights = {
        rename(name): each.detach()
        for name, each in adapted.named_parameters()
        if each.requires_grad
    }
    ours = {name: tensor for name, tensor in ranks[0]["weights"].items() if name in weights}
    assert_same_tensors(ours, weights, atol=2e-5)
