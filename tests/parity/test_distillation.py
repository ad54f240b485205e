"""Distillation equals its formula on the logits of two transformers models: losses and gradients, in any layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.families.parity import Rows, padded_sentences, pretrained_module, tiny_model
from tests.marks import accelerator_of, exhaustive, on_gpus
from tests.models import VOCAB_SIZE
from tests.parity.hugging_face import tensors_of
from tests.parity.test_dpo import LR, STEPS, compare_steps, saved_names, tiny
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2,
    PP2_DP2,
    RECOMPUTED,
    TP2_SP,
    Case,
    Layout,
    refusal,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

TEMPERATURE = 1.7
ALPHA = 0.6
TOP = 5
_CP = Layout(cp=2, cp_comm_type="a2a")
_CP_TP = Layout(cp=2, cp_comm_type="all_gather", tp=2, sequence_parallel=True)


def _teacher(family: str) -> Any:
    """A teacher with another depth and width than the students'."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if family == "gpt2":  # its embedding is tied
        config: Any = GPT2Config(
            vocab_size=VOCAB_SIZE, n_layer=8, n_embd=24, n_head=6, n_positions=16
        )
    elif family == "qwen3_moe":
        return tiny(family)
    else:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=8,
            hidden_size=48,
            intermediate_size=40,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    return tiny_model(AutoModelForCausalLM, config, seed=9)


# ---- the formula ----------------------------------------------------------------------------------------------------


def _logits(hf_model: Any, rows: Rows) -> Tensor:
    inputs = ("input_ids", "attention_mask")
    batch = {name: torch.stack([row[name] for row in rows]) for name in inputs}
    logits: Tensor = hf_model(**batch).logits
    return logits[:, :-1]


def _formula(
    student: Tensor,
    teacher: Tensor,
    rows: Rows,
    top: int | None,
) -> dict[str, Tensor]:
    """Means over targets of everything that is logged, by logits [rows, positions, vocabulary]."""
    labels = torch.stack([row["labels"] for row in rows])[:, 1:]
    is_target = labels != -100
    goals = teacher[is_target] / TEMPERATURE
    if top is not None:
        kept = goals.topk(top, dim=-1).indices
        is_kept = torch.zeros_like(goals, dtype=torch.bool).scatter(1, kept, True)
        goals = goals.masked_fill(~is_kept, -torch.inf)
    probabilities = goals.softmax(dim=-1)
    log_ratios = probabilities.log() - (student[is_target] / TEMPERATURE).log_softmax(dim=-1)
    divergences = torch.where(probabilities > 0, probabilities * log_ratios, 0.0).sum(dim=-1)
    log_probabilities = student[is_target].log_softmax(dim=-1)
    cross_entropy = -log_probabilities.gather(1, labels[is_target][:, None])[:, 0]
    losses = (1 - ALPHA) * cross_entropy + ALPHA * TEMPERATURE**2 * divergences
    return {
        "loss": losses.mean(),
        "distillation_loss": losses.mean(),
        "lm_loss": cross_entropy.mean(),
        "kl_loss": divergences.mean(),
    }


def _train_by_formula(
    hf_model: Any, teacher: Tensor, rows: Rows, top: int | None
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
    """Logged values and gradients of each step of the transformers model, which is trained in place."""
    parameters = dict(hf_model.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=LR,
        eps=1e-3,
        weight_decay=0.0,
    )
    logged = []
    gradients = []
    for _ in range(STEPS):
        values = _formula(_logits(hf_model, rows), teacher, rows, top)
        optimizer.zero_grad()
        values["loss"].backward()
        gradients.append({name: each.grad.clone() for name, each in parameters.items()})
        optimizer.step()
        logged.append({name: value.item() for name, value in values.items()})
    return logged, gradients


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _train(
    student: str,
    teacher: str | None,
    case: Case,
    rows: Rows,
) -> dict[str, Any]:
    """Train on this rank; validate three rows, which divide neither into microbatches nor over replicas."""
    from lightning_megatron import DistillationTrainStep
    from lightning_megatron.engine.optimizer_options import OptimizerOptions
    from tests.checkpoint.runs import callback
    from tests.parity.sharding import gradients_as_weights

    logged: list[dict[str, float]] = []
    gradients: list[dict[str, Tensor]] = []

    def step(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with gradients_as_weights(pl_module):
            gradients.append(tensors_of(pl_module))

    def end(trainer: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        logged.append({name: value.item() for name, value in metrics.items()})

    module = pretrained_module(
        student,
        train_step=DistillationTrainStep(teacher, temperature=TEMPERATURE, alpha=ALPHA),
        lr=LR,
        optimizer=OptimizerOptions(eps=1e-3, weight_decay=0.0),
    )
    dp = case.layout.dp
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows) // dp)  # type: ignore[arg-type]
    recorder = callback(on_before_optimizer_step=step, on_train_batch_end=end)
    train_module(module, case, loader, collect=tensors_of, callbacks=[recorder])
    odd: DataLoader[Any] = DataLoader(rows[:3], batch_size=3 if dp == 1 else 2)  # type: ignore[arg-type]
    (validated,) = trainer_of(case).validate(module, odd, verbose=False)
    assert not any("teacher" in name for name in module.state_dict())
    return {"logged": logged, "gradients": gradients, "validated": dict(validated)}


_CASES = [
    pytest.param("llama", "gpt2", FOUR_RANKS, None, id="tp2-pp2-sp"),
]
_RARER_CASES = [
    on_gpus(1, "llama", "gpt2", Layout(), None, id="gpu"),
    on_gpus(1, "qwen3_moe", "llama", Layout(), TOP, id="top-experts-gpu"),
    exhaustive("llama", "llama", _CP_TP, TOP, id="top-cp2-tp2-sp"),
    exhaustive("llama", "llama", Layout(), None, id="one_process"),
    exhaustive("gpt2", "llama", TP2_SP, None, id="tp2-sp"),
    exhaustive("llama", "llama", INTERLEAVED, None, id="vpp"),
    exhaustive("llama", "gpt2", PP2_DP2, None, id="pp2-dp2"),
    exhaustive("llama", "llama", _CP, None, id="cp2"),
    exhaustive("llama", "gpt2", _CP_TP, None, id="cp2-tp2-sp"),
    exhaustive("llama", "llama", RECOMPUTED, None, id="recomputed"),
    exhaustive("llama", "qwen3_moe", TP2_SP, None, id="experts-teach"),
    exhaustive("qwen3_moe", "llama", replace(TP2_SP, ep=2), None, id="experts-learn"),
    exhaustive("qwen3_moe", "qwen3_moe", Layout(dp=2, ep=2), None, id="experts"),
    exhaustive("llama", "llama", Layout(), TOP, id="top-one_process"),
    exhaustive("llama", "llama", FOUR_RANKS, TOP, id="top-tp2-pp2-sp"),
]


@pytest.mark.parametrize(("family", "teacher", "layout", "top"), [*_CASES, *_RARER_CASES])
def test_distillation_equals_the_formula_on_transformers_logits(
    family: str,
    teacher: str,
    layout: Layout,
    top: int | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    hf_model = tiny(family)
    hf_model.save_pretrained(tmp_path / "student")
    hf_teacher = _teacher(teacher)
    hf_teacher.save_pretrained(tmp_path / "teacher")
    rows = padded_sentences()
    with torch.no_grad():
        goals = _logits(hf_teacher, rows)
    given: str | None = str(tmp_path / "teacher")
    batches = rows
    if top is not None:
        given = None
        batches = _with_top(rows, goals, top)
    case = Case(layout=layout, steps=STEPS, accelerator=accelerator_of(request))
    ranks = run_ranks(
        _train,
        layout.world_size,
        str(tmp_path / "student"),
        given,
        case,
        batches,
    )
    logged, gradients = _train_by_formula(hf_model, goals, rows, top)
    compare_steps(ranks, logged, saved_names(hf_model, gradients))
    expected = _formula(
        _logits(hf_model, rows[:3]).detach(),
        goals[:3],
        rows[:3],
        top,
    )
    for rank in ranks:
        validated = rank["validated"]
        for name, value in expected.items():
            assert validated[f"val_{name}"] == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
        perplexity = expected["lm_loss"].exp().item()
        assert validated["val_perplexity"] == pytest.approx(perplexity, rel=2e-4)


def _with_top(rows: Rows, goals: Tensor, top: int) -> Rows:
    """Rows with the teacher's top-k logits; the last position, which predicts nothing, has one token alone."""
    values, ids = goals.topk(top, dim=-1)
    last = torch.full((len(rows), 1, top), -1)
    last[..., 0] = 0
    ids = torch.cat([ids, last], dim=1)
    values = torch.cat([values, torch.zeros(last.shape)], dim=1)
    return [
        {**row, "teacher_ids": ids[number], "teacher_logits": values[number]}
        for number, row in enumerate(rows)
    ]


# ---- refusals -------------------------------------------------------------------------------------------------------


def _refusals(
    student: str,
    teacher: str,
    other: str,
) -> list[str]:
    from lightning_megatron import DistillationTrainStep, MegatronModule

    def provider(*_: Any) -> Any:
        raise AssertionError("nothing is built")

    rows: DataLoader[Any] = DataLoader(padded_sentences(), batch_size=4)  # type: ignore[arg-type]

    def fit(directory: str | None, **options: Any) -> None:
        step = DistillationTrainStep(directory)
        module = MegatronModule(model=student, pretrained=True, train_step=step, **options)
        trainer_of(Case(layout=PP2, steps=1)).fit(module, rows)

    return [
        refusal(fit, other),
        refusal(fit, teacher, model_provider=provider),
        refusal(fit, f"{teacher}/none"),
        refusal(fit, f"{teacher}/config"),
        refusal(fit, None),
    ]


def test_what_a_teacher_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny("llama").save_pretrained(tmp_path / "student")
    teacher = _teacher("llama")
    teacher.save_pretrained(tmp_path / "teacher")
    teacher.config.save_pretrained(tmp_path / "teacher/config")
    odd = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_layer=3,
        n_embd=8,
        n_head=2,
        n_positions=16,
    )
    GPT2LMHeadModel(odd).save_pretrained(tmp_path / "odd")
    folders = [str(tmp_path / name) for name in ("student", "teacher", "odd")]
    messages, others = run_ranks(_refusals, 2, *folders)
    expected = [
        f"teacher={tmp_path}/odd: pp=2 does not divide num_layers=3",
        "DistillationTrainStep: expected this package's GPT, whose logits it reads, got a model_prov",
        "teacher/none",
        "teacher/config: expected one of model.safetensors",
        "batch: expected teacher_ids and teacher_logits, since teacher=None, got attention_mask, inp",
    ]
    for message, other, part in zip(messages, others, expected, strict=True):
        assert part in message
        assert part in other


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 90}, "expected the student's vocabulary of 83 tokens, got 90; give a teacher"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "expected a GPT that is a language m"),
    ],
)  # fmt: skip
def test_another_vocabulary_or_task_is_refused(
    sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from transformers import GPT2Config

    from lightning_megatron import DistillationTrainStep, MegatronModule

    config = GPT2Config(**{"vocab_size": VOCAB_SIZE, **sizes})
    config.save_pretrained(tmp_path)
    student = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE}
    step = DistillationTrainStep(tmp_path)
    assert message in refusal(MegatronModule, model=student, train_step=step)
