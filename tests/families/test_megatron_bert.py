"""Megatron-BERT equals Hugging Face: pre-norm blocks, token types, and the heads of five tasks."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.families.parity import Rows, check_family, tiny_model
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.sharding import full_tensors
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2_DP2,
    RECOMPUTED,
    Case,
    Layout,
    Outcome,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

LENGTHS = (16, 9, 5, 12)
PAD = 3
TOKEN_TYPES = 3
NUM_LABELS = 5
TWO_REPLICAS = Layout(dp=2, num_microbatches=2)
"""One row per microbatch: means of means would differ from Hugging Face's mean over the batch."""


@functools.cache
def bert_model(
    head: str,
    num_labels: int = 2,
    problem_type: str | None = None,
) -> Any:
    import transformers

    config = transformers.MegatronBertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        type_vocab_size=TOKEN_TYPES,
        pad_token_id=PAD,
        layer_norm_eps=1e-3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=num_labels,
        problem_type=problem_type,
    )
    return tiny_model(getattr(transformers, f"MegatronBertFor{head}"), config)


def _sentences(**labels: torch.Tensor) -> Rows:
    """Padded rows with token types; the padding token occurs at real positions as well."""
    generator = torch.Generator().manual_seed(5)
    num_rows = len(LENGTHS)
    length = max(LENGTHS)
    is_real = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(0, VOCAB_SIZE, (num_rows, length), generator=generator)
    tokens[~is_real] = PAD
    tokens[:, 2] = PAD
    types = torch.randint(0, TOKEN_TYPES, (num_rows, length), generator=generator)
    batch = {
        "input_ids": tokens,
        "attention_mask": is_real.long(),
        "token_type_ids": types,
        **labels,
    }
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(num_rows)]


def _labels_of_tokens(limit: int) -> torch.Tensor:
    """Labels for about half of the real tokens; their number differs between rows, the second has none."""
    generator = torch.Generator().manual_seed(6)
    labels = torch.randint(
        0,
        limit,
        (len(LENGTHS), max(LENGTHS)),
        generator=generator,
    )
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    labelled = real & (torch.rand(labels.shape, generator=generator) < 0.5)
    labelled[1] = False
    return labels.masked_fill(~labelled, -100)


def _pretraining_rows() -> Rows:
    return _sentences(
        labels=_labels_of_tokens(VOCAB_SIZE),
        next_sentence_label=torch.tensor([1, 0, -100, 1]),
    )


CLASSES = torch.tensor([4, 0, -100, 2])
VALUES = torch.linspace(-1, 1, 12).view(4, 3).roll(1)
CASES: dict[str, tuple[Any, Layout, Rows]] = {
    **{f"pretraining-{layout}": (("PreTraining",), layout, _pretraining_rows())
       for layout in (FOUR_RANKS, INTERLEAVED, TWO_REPLICAS, RECOMPUTED)},
    "given positions": (("PreTraining",), FOUR_RANKS, [
        {**row, "position_ids": (torch.arange(16) * 5 + i) % 24} for i, row in enumerate(_pretraining_rows())
    ]),
    "masked_lm": (("MaskedLM",), FOUR_RANKS, _sentences(labels=_labels_of_tokens(VOCAB_SIZE))),
    "one value": (("SequenceClassification", 1), TWO_REPLICAS, _sentences(labels=torch.tensor([0.5, -1.25, 2.0, 0.0]))),
    "values": (("SequenceClassification", 3, "regression"), TWO_REPLICAS, _sentences(labels=VALUES)),
    "classes": (("SequenceClassification", NUM_LABELS), FOUR_RANKS, _sentences(labels=CLASSES)),
    "several labels": (("SequenceClassification", 3), TWO_REPLICAS, _sentences(labels=(VALUES > 0).float())),
    "classes of tokens": (
        ("TokenClassification", NUM_LABELS), FOUR_RANKS, _sentences(labels=_labels_of_tokens(NUM_LABELS))
    ),
    "answers outside the row": (("QuestionAnswering",), FOUR_RANKS, _sentences(
        start_positions=torch.tensor([0, 3, 16, 15]), end_positions=torch.tensor([4, 8, 99, 15])
    )),
}  # fmt: skip
"""Head with its options, layout and rows."""


_CP_TP = Layout(cp=2, cp_comm_type="all_gather", tp=2, sequence_parallel=True)
_CP_PP = Layout(cp=2, cp_comm_type="a2a", pp=2, num_microbatches=2)
IN_EVERY_RUN = (("classes", _CP_TP), ("classes of tokens", _CP_PP))
SPLIT_ROWS = [
    (name, layout) if (name, layout) in IN_EVERY_RUN else exhaustive(name, layout)
    for name in (
        "given positions",
        "masked_lm",
        "classes",
        "classes of tokens",
        "answers outside the row",
    )
    for layout in (_CP_TP, _CP_PP, Layout(cp=4))
]


_EXHAUSTIVE = {
    f"pretraining-{INTERLEAVED}",
    f"pretraining-{RECOMPUTED}",
    "given positions",
    "values",
    "classes",
    "several labels",
    "classes of tokens",
}
FULL_ROWS = [
    exhaustive(name, layout) if name in _EXHAUSTIVE else (name, layout)
    for name, (_, layout, _) in CASES.items()
]


@pytest.mark.parametrize(
    ("case", "layout"),
    [*FULL_ROWS, *SPLIT_ROWS],
    ids=str,
)
def test_bert_equals_hugging_face(case: str, layout: Layout) -> None:
    head, _, rows = CASES[case]
    check_family(bert_model(*head), layout, rows)


# ---- features that Hugging Face does not have -----------------------------------------------------------------------


def _fields(**changes: Any) -> dict[str, Any]:
    return {
        **bert_model("PreTraining").config.to_dict(),
        "architectures": None,
        "initializer_range": 0.2,
        **changes,
    }


def _train(
    case: Case,
    rows: Rows,
    binary_head: bool,
) -> tuple[Outcome, dict[str, float]]:
    from lightning.pytorch import seed_everything

    from lightning_megatron import BertTrainStep, MegatronModule

    seed_everything(1, verbose=False)
    module = MegatronModule(
        model=_fields(),
        task="pretraining",
        train_step=BertTrainStep(binary_head),
        lr=case.lr,
    )
    loader: DataLoader[Any] = DataLoader(rows * case.steps, batch_size=len(rows) // case.layout.dp)  # type: ignore[arg-type]
    outcome = train_module(module, case, loader)
    metrics = module.trainer.callback_metrics
    return outcome, {name: float(value) for name, value in metrics.items()}


def test_pretraining_without_binary_head_trains_tokens_only() -> None:
    # With overlapped communication the engine waits for every weight's gradient, also the unused head's.
    layout = Layout(dp=2, pp=2, num_microbatches=2, overlap_communication=True)
    with_head, without_head = (
        run_ranks(
            _train,
            4,
            Case(layout=layout, steps=1),
            _pretraining_rows(),
            has_head,
        )
        for has_head in (True, False)
    )
    for (_, terms), (outcome, metrics) in zip(with_head, without_head, strict=True):
        assert terms["train_loss"] == pytest.approx(
            terms["train_lm_loss"] + terms["train_sop_loss"]
        )
        assert outcome.losses == [pytest.approx(terms["train_lm_loss"])]
        assert "train_sop_loss" not in metrics
    gradients = full_tensors([outcome.gradients for outcome, _ in without_head])
    unused = [name for name, gradient in gradients.items() if (gradient == 0).all()]
    assert sorted(unused) == [
        "binary_head.bias",
        "binary_head.weight",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]


def _validate(
    layout: Layout,
    rows: Rows,
    task: str,
    precision: str,
) -> dict[str, float]:
    from lightning.pytorch import seed_everything

    from lightning_megatron import MegatronModule

    seed_everything(1, verbose=False)
    module = MegatronModule(model=_fields(num_labels=NUM_LABELS), task=task)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=4 // layout.dp)  # type: ignore[arg-type]
    (metrics,) = trainer_of(Case(layout=layout, precision=precision)).validate(
        module, loader, verbose=False
    )
    return dict(metrics)


@pytest.mark.parametrize("task", ["pretraining", "sequence_classification"])
def test_indivisible_rows_have_metrics_of_one_process(task: str) -> None:
    rows = _pretraining_rows() if task == "pretraining" else _sentences(labels=CLASSES)
    rows = (rows * 2)[:7]
    (expected,) = run_ranks(
        _validate,
        1,
        Layout(),
        rows,
        task,
        "32-true",
    )
    layout = PP2_DP2
    ranks = run_ranks(_validate, 4, layout, rows, task, "32-true")
    assert ranks == [pytest.approx(expected, rel=1e-5)] * 4
    if task == "pretraining":
        # 8 bits of precision: errors of about 1 % of the logits.
        for rank in run_ranks(_validate, 4, FOUR_RANKS, rows, task, "bf16-mixed"):
            assert rank["val_loss"] == pytest.approx(expected["val_loss"], rel=0.02)
