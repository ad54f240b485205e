"""Classification heads of GPTs equal transformers: classes and values of rows, classes of tokens, and rewards."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader

from lightning_megatron.convert import ConvertOptions
from lightning_megatron.convert.convert import convert
from lightning_megatron.convert.formats import open_source
from lightning_megatron.convert.registry import known_families, model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.planning.flops import forward_flops, head_flops
from lightning_megatron.planning.parameters import total_parameters
from tests.families.parity import Rows, check_family, pretrained_module, tiny_model
from tests.families.test_experts import FAMILIES as MIXTURES
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.models import VOCAB_SIZE
from tests.parity.hugging_face import tensors_of
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2_DP2,
    RECOMPUTED,
    TP2,
    TP2_SP,
    Case,
    Layout,
    refusal,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

PAD = 3
LENGTHS = (16, 9, 5, 12)
NUM_LABELS = 5
_SEQUENCES = "ForSequenceClassification"
_TOKENS = "ForTokenClassification"


@functools.cache
def classifier(
    family: str,
    head: str,
    num_labels: int = NUM_LABELS,
    problem_type: str | None = None,
) -> Any:
    """Create a tiny transformers model of a family with a head."""
    import transformers

    name, fields = {**MIXTURES, **FAMILIES}[family]
    if family in MIXTURES:
        # transformers has no load-balancing loss with these heads.
        fields = {**fields, "router_aux_loss_coef": 0.0}
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": VOCAB_SIZE,
            **fields,
            "pad_token_id": PAD,
            "num_labels": num_labels,
            "problem_type": problem_type,
            "classifier_dropout": 0.0,
        }
    )
    config._attn_implementation = "eager"
    return tiny_model(getattr(transformers, name + head), config)


def sentences(side: str = "right", **labels: torch.Tensor) -> Rows:
    """Rows with padding, whose token is nowhere else, and labels."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(
        PAD + 1,
        VOCAB_SIZE,
        (len(LENGTHS), max(LENGTHS)),
        generator=generator,
    )
    places = torch.arange(max(LENGTHS))
    if side == "left":
        places = places.flip(0)
    is_real = places < torch.tensor(LENGTHS)[:, None]
    batch = {
        "input_ids": tokens.masked_fill(~is_real, PAD),
        "attention_mask": is_real.long(),
        **labels,
    }
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(LENGTHS))]


def labels_of_tokens() -> torch.Tensor:
    """Labels of about half of the real tokens; their number differs between rows, the second has none."""
    generator = torch.Generator().manual_seed(6)
    shape = (len(LENGTHS), max(LENGTHS))
    labels = torch.randint(0, NUM_LABELS, shape, generator=generator)
    is_real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    is_target = is_real & (torch.rand(shape, generator=generator) < 0.5)
    is_target[1] = False
    return labels.masked_fill(~is_target, -100)


VALUES = torch.linspace(-1, 1, 12).view(4, 3).roll(1)
CLASSES = torch.tensor([4, 0, -100, 2])
HEADS: dict[str, tuple[tuple[Any, ...], Rows]] = {
    "classes": ((_SEQUENCES,), sentences(labels=CLASSES)),
    "classes, left": ((_SEQUENCES,), sentences("left", labels=CLASSES.clamp(min=0))),
    "several labels": ((_SEQUENCES, 3), sentences(labels=(VALUES > 0).float())),
    "values": ((_SEQUENCES, 3, "regression"), sentences(labels=VALUES)),
    "one value": ((_SEQUENCES, 1, "regression"), sentences(labels=VALUES[:, 0])),
    "classes of tokens": ((_TOKENS,), sentences(labels=labels_of_tokens())),
}
"""Head with its options, and rows."""

_CP = Layout(cp=2, cp_comm_type="a2a")
_CP_TP = Layout(cp=2, cp_comm_type="all_gather", tp=2, sequence_parallel=True)
_TWO_REPLICAS = Layout(dp=2, num_microbatches=2)
CASES: tuple[tuple[str, str, Layout], ...] = (
    ("llama", "classes", FOUR_RANKS),
    ("llama", "classes", _CP_TP),
    ("llama", "one value", _TWO_REPLICAS),
    ("llama", "classes of tokens", _CP),
    ("gpt2", "several labels", INTERLEAVED),
    ("gpt2", "classes of tokens", FOUR_RANKS),
)
_ALL_LAYOUTS = (Layout(), TP2_SP, FOUR_RANKS, INTERLEAVED, _CP)
RARER_CASES: tuple[tuple[str, str, Layout], ...] = (
    *(("llama", head, layout) for head in HEADS for layout in _ALL_LAYOUTS),
    *(("gpt2", head, layout) for head in HEADS for layout in (_CP, FOUR_RANKS)),
    *(("qwen3", head, FOUR_RANKS) for head in HEADS),
    *(("gpt_neox", head, FOUR_RANKS) for head in HEADS),
    *(("falcon", head, FOUR_RANKS) for head in HEADS if head != "classes"),
    *(
        (family, head, Layout())
        for family in (
            *("gemma2", "gemma3_text", "bloom", "opt", "olmo2", "phi3", "gpt_bigcode"),
            "qwen3_5_text",
        )
        for head in ("classes", "classes, left")
    ),
    *(
        (family, head, replace(TP2_SP, ep=2))
        for family in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
        for head in ("classes", "classes of tokens")
    ),
    ("llama", "classes", TP2),
    ("llama", "classes", RECOMPUTED),
    ("llama", "values", replace(_CP, pp=2, num_microbatches=2)),
    ("mistral", "classes, left", Layout(cp=4)),
)


@pytest.mark.parametrize(
    ("family", "head", "layout"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}", marks=marks)
        for cases, marks in ((CASES, ()), (RARER_CASES, pytest.mark.exhaustive))
        for case in cases
        if marks == () or case not in CASES
    ],
)
def test_head_equals_transformers(family: str, head: str, layout: Layout) -> None:
    options, rows = HEADS[head]
    check_family(classifier(family, *options), layout, rows)


# ---- families -------------------------------------------------------------------------------------------------------


def test_classes_are_those_of_transformers() -> None:
    from transformers.models.auto import modeling_auto

    names = {
        "sequence_classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token_classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    for model_type, family in known_families().items():
        for task, head in family.heads.items():
            assert head.architecture == names[task].get(model_type), (model_type, task)


@pytest.mark.parametrize(
    ("family", "head"), [("llama", _SEQUENCES), ("llama", _TOKENS), ("gpt2", _TOKENS)]
)
def test_counts_equal_transformers(family: str, head: str) -> None:
    hf_model = classifier(family, head)
    model = model_config(hf_model.config)
    count = sum(parameter.numel() for parameter in hf_model.parameters())
    assert total_parameters(model) == count
    language_model = model_config(hf_model.config, "causal_lm")
    pooled = 1 if head == _SEQUENCES else 8
    assert head_flops(model, (8,), VOCAB_SIZE) == 2 * pooled * model.hidden_size * NUM_LABELS
    assert forward_flops(model, (8,), VOCAB_SIZE) < forward_flops(language_model, (8,), VOCAB_SIZE)


def test_task_follows_the_config_and_the_argument() -> None:
    config = copy.deepcopy(classifier("gemma3_text", _SEQUENCES).config)
    config.architectures = ["Gemma3TextForSequenceClassification"]
    assert model_config(config).task == "sequence_classification"
    assert model_config(config, "causal_lm").task == "causal_lm"
    assert model_config(config, "token_classification").task == "token_classification"
    assert model_config(config, "causal_lm").to_dict()["num_labels"] == 2


# ---- rewards --------------------------------------------------------------------------------------------------------


def _pairs() -> Rows:
    """Four pairs with padding; the chosen sequences have 16 tokens, the rejected ones 12."""
    chosen = sentences()
    rejected = sentences("left")[::-1]
    rows = []
    for one, other in zip(chosen, rejected, strict=True):
        rows.append(
            {
                "chosen_input_ids": one["input_ids"],
                "chosen_attention_mask": one["attention_mask"],
                "rejected_input_ids": other["input_ids"][4:].clone(),
                "rejected_attention_mask": other["attention_mask"][4:].clone(),
            }
        )
    return rows


def _reward_run(
    directory: str,
    layout: Layout,
    rows: Rows,
) -> tuple[float, Any, dict[str, float]]:
    """Loss and gradients of one step, and the metrics of a validation, of the reward model in ``directory``."""
    case = Case(layout=layout, steps=1)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows) // layout.dp)  # type: ignore[arg-type]
    options = {"train_step": "reward"}
    run = train_module(pretrained_module(directory, **options), case, loader, collect=tensors_of)
    # Three pairs do not divide into two microbatches, or over two replicas.
    odd: DataLoader[Any] = DataLoader(rows[:3], batch_size=3 if layout.dp == 1 else 2)  # type: ignore[arg-type]
    (metrics,) = trainer_of(case).validate(
        pretrained_module(directory, **options), odd, verbose=False
    )
    return run.losses[0], run.gradients, dict(metrics)


@pytest.mark.parametrize(
    "layout",
    [
        FOUR_RANKS,
        pytest.param(Layout(), marks=pytest.mark.exhaustive),
        pytest.param(PP2_DP2, marks=pytest.mark.exhaustive),
        pytest.param(_CP, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_reward_loss_equals_the_formula_on_transformers_logits(
    layout: Layout, tmp_path: Path
) -> None:
    hf_model = classifier("llama", _SEQUENCES, 1)
    hf_model.save_pretrained(tmp_path)
    rows = _pairs()
    margins = []
    for row in rows:
        rewards = [
            hf_model(
                input_ids=row[f"{name}_input_ids"][None],
                attention_mask=row[f"{name}_attention_mask"][None],
            ).logits[0, 0]
            for name in ("chosen", "rejected")
        ]
        margins.append(rewards[0] - rewards[1])
    stacked = torch.stack(margins)
    loss = torch.log(1 + torch.exp(-stacked)).mean()
    hf_model.zero_grad(set_to_none=True)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in hf_model.named_parameters()}
    hf_model.zero_grad(set_to_none=True)
    ranks = run_ranks(_reward_run, layout.world_size, str(tmp_path), layout, rows)
    first = stacked[:3].detach()
    for rank_loss, _, metrics in ranks:
        assert rank_loss == pytest.approx(loss.item(), rel=2e-6)
        assert metrics["val_accuracy"] == pytest.approx((first > 0).float().mean().item())
        assert metrics["val_margin"] == pytest.approx(first.mean().item(), abs=2e-5)
        assert metrics["val_loss"] == pytest.approx(-logsigmoid(first).mean().item(), rel=1e-5)
    gradients = ranks[0][1]
    assert gradients.keys() == expected.keys()
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-6 * total, name


# ---- training, predictions and refusals -----------------------------------------------------------------------------

_LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    **FAMILIES["llama"][1],
    "initializer_range": 0.2,
}
_GRANITE = {**_LLAMA, **FAMILIES["granite"][1], "model_type": "granite"}


def _predict(
    layout: Layout,
    task: str,
    rows: Rows,
) -> list[torch.Tensor]:
    """Train a classifier of three labels for one step; its predictions of seven rows, in their order."""
    from lightning.pytorch import seed_everything

    from lightning_megatron import MegatronModule, gather_predictions

    seed_everything(1, verbose=False)
    module = MegatronModule(
        model={**_LLAMA, "num_labels": 3, "classifier_dropout": 0.0},
        task=task,
        return_logits=True,
    )
    case = Case(layout=layout, steps=1)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows) // layout.dp)  # type: ignore[arg-type]
    trainer_of(case).fit(module, loader)
    trainer = trainer_of(case)
    seven: Any = DataLoader((rows * 2)[:7], batch_size=2)  # type: ignore[arg-type]
    return gather_predictions(trainer, trainer.predict(module, seven))


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_predictions_have_the_order_of_the_rows(task: str) -> None:
    labels = torch.tensor([0, 1, 2, 1])
    if task == "token_classification":
        labels = labels[:, None].expand(4, 16)
    rows = sentences(labels=labels.contiguous())
    (expected,) = run_ranks(_predict, 1, Layout(), task, rows)
    assert [len(expected), *expected[0].shape] == [7, *labels.shape[1:], 3]
    layout = replace(TP2_SP, dp=2)
    for rank in run_ranks(_predict, 4, layout, task, rows):
        for row, (got, wanted) in enumerate(zip(rank, expected, strict=True)):
            real = rows[row % 4]["attention_mask"].bool()
            if task == "token_classification":
                got = got[real]
                wanted = wanted[real]
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=2e-5)


def _metrics(layout: Layout, kind: str) -> dict[str, float]:
    """Metrics of seven rows or pairs after two steps on them, by a data module."""
    from lightning.pytorch import seed_everything

    from lightning_megatron import DatasetDataModule, MegatronModule

    seed_everything(1, verbose=False)
    rows = _pairs()
    options: dict[str, Any] = {"num_labels": 1, "train_step": "reward"}
    if kind == "classes":
        rows = sentences(labels=CLASSES.clamp(min=0))
        options = {"num_labels": NUM_LABELS}
    seven: Any = (rows * 2)[:7]
    module = MegatronModule(model=_LLAMA, task="sequence_classification", **options)
    data = DatasetDataModule(train=seven, valid=seven, micro_batch_size=1)
    trainer = trainer_of(Case(layout=layout, steps=2))
    trainer.fit(module, datamodule=data)
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    return dict(metrics)


@pytest.mark.parametrize("kind", ["reward", pytest.param("classes", marks=pytest.mark.exhaustive)])
def test_indivisible_rows_have_metrics_of_one_process(kind: str) -> None:
    (expected,) = run_ranks(_metrics, 1, Layout(num_microbatches=4), kind)
    names = {"reward": ("accuracy", "margin"), "classes": ("accuracy", "f1")}[kind]
    assert {f"val_{name}" for name in names} <= expected.keys()
    for rank in run_ranks(_metrics, 4, PP2_DP2, kind):
        assert rank == pytest.approx(expected, rel=1e-4)


def _refused_export(directory: str) -> list[str]:
    """Train heads of a family for which transformers has none; what exports and other uses say."""
    from lightning_megatron import MegatronModule

    module = MegatronModule(model=_GRANITE, task="sequence_classification")
    rows = sentences(labels=torch.tensor([0, 1, 1, 0]))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    trainer = trainer_of(Case(steps=1))
    trainer.fit(module, loader)
    assert trainer.callback_metrics["train_loss"].isfinite()
    trainer.save_checkpoint(f"{directory}/run.ckpt")
    return [
        refusal(module.save_pretrained, f"{directory}/exported"),
        refusal(module.generate, rows[0]["input_ids"][None]),
    ]


def test_heads_without_a_class_train_and_are_not_exported(tmp_path: Path) -> None:
    ((exported, generated),) = run_ranks(_refused_export, 1, str(tmp_path))
    assert exported.startswith(
        "transformers has no granite model for task='sequence_classification'; keep it as a checkpoint"
    )
    assert generated.startswith("generate is for language models, and this granite has a head for")
    assert not (tmp_path / "exported").exists()
    options = ConvertOptions(
        load_path=tmp_path / "run.ckpt",
        save_path=tmp_path / "kept",
        to="megatron",
    )
    with pytest.raises(ConfigError, match="transformers has no granite model"):
        convert(replace(options, to="hf"))
    with pytest.raises(ConfigError, match="to=megatron-legacy: expected a language model"):
        convert(replace(options, to="megatron-legacy"))
    convert(options)
    assert open_source(tmp_path / "kept").model.task == "sequence_classification"


def _new_head(directory: str, layout: Layout) -> list[torch.Tensor]:
    """Train a new head on a language model; logits now, and after a checkpoint."""
    from lightning_megatron import MegatronModule

    options: dict[str, Any] = {
        "task": "sequence_classification",
        "num_labels": 3,
        "problem_type": "multi_label_classification",
    }
    rows = sentences(labels=(VALUES > 0).float())
    loader: DataLoader[Any] = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    case = Case(layout=layout, steps=1)
    module = pretrained_module(directory + "/source", **options)
    trainer = trainer_of(case)
    trainer.fit(module, loader)
    inputs = [torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")]
    logits = [module.logits(*inputs)]
    module.save_pretrained(directory + "/exported")
    trainer.save_checkpoint(directory + "/run.ckpt")
    restored = MegatronModule.load_from_checkpoint(directory + "/run.ckpt")
    trainer_of(case).validate(restored, loader, verbose=False)
    logits.append(restored.logits(*inputs))
    assert restored.model_config.problem_type == "multi_label_classification"
    return logits


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.exhaustive), "gpt_neox"]
)
def test_new_head_on_a_language_model_is_exported_with_its_labels(
    family: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    # Its output layer, which the head replaces, has another name in files.
    gpt_model(family, {"pad_token_id": PAD}).save_pretrained(tmp_path / "source")
    ranks = run_ranks(_new_head, 2, str(tmp_path), TP2_SP)
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    assert exported.config.num_labels == 3
    assert exported.config.problem_type == "multi_label_classification"
    rows = sentences()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = exported(**batch).logits.detach()
    for logits in ranks:
        for actual in logits:
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_labels": 3},
            "num_labels=3: expected task='sequence_classification' or 'token_classification', got 'causal_lm'",
        ),
        (
            {"task": "token_classification", "problem_type": "regression"},
            "problem_type='regression': expected task='sequence_classification', got 'token_cl",
        ),
        (
            {"task": "sequence_classification", "problem_type": "multi"},
            "problem_type='multi' is unknown; choose from regression",
        ),
        ({"task": "sequence_classification", "num_labels": 0}, "num_labels"),
        (
            {"task": "sequence_classification", "num_labels": 1_000_000},
            "num_labels=1000000",
        ),
        (
            {"task": "sequence_classification", "train_step": "reward"},
            "num_labels=1, got task='sequence_classification', num_labels=2",
        ),
        ({"task": "question_answering"}, "task='question_answering' is unknown to llama models"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    from lightning_megatron import MegatronModule

    assert message in refusal(MegatronModule, model=_LLAMA, **options)
