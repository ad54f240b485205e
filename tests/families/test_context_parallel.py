"""Context parallelism: every mask, position and head on split sequences equals Hugging Face on whole ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.families.parity import check_family
from tests.families.t5_models import mt5, t5
from tests.families.test_gpts import changes_of, gpt_model
from tests.families.test_gpts import rows_of as gpt_rows
from tests.families.test_megatron_bert import CASES as BERTS
from tests.families.test_megatron_bert import bert_model
from tests.families.test_t5 import _pairs as pairs
from tests.parity.comparison import assert_same_within_rounding
from tests.parity.training import Case, Layout, Outcome, RankOutcome, joined_outcome, module_of, train_module
from tests.ranks import run_ranks

_A2A = Layout(cp=2, cp_comm_type="a2a")
_GATHER = Layout(cp=2, cp_comm_type="all_gather")
_FOUR = Layout(cp=4)
"""Of two key/value heads: they are gathered."""
_TP = replace(_GATHER, tp=2, sequence_parallel=True)
_PP = replace(_A2A, pp=2, num_microbatches=2)


GPTS: tuple[tuple[str, dict[str, Any], Layout, str, bool], ...] = (
    ("llama", {}, _TP, "right", True),
    ("mistral", {}, _FOUR, "left", True),
    ("bloom", {}, replace(_A2A, tp=2), "left", True),
    ("gpt2", {}, replace(_A2A, pp=2, vpp=2, num_microbatches=2), "positions", True),
    *(("llama", {}, layout, "right", False) for layout in (_A2A, _GATHER, _FOUR, _PP, replace(_PP, vpp=2))),
    ("llama", {}, replace(_TP, recompute="selective"), "left", False),
    ("llama", {}, replace(_A2A, recompute="full"), "positions", False),
    *(("mistral", {}, layout, rows, False) for layout in (_A2A, _GATHER, _TP) for rows in ("left", "positions")),
    *(("bloom", {}, layout, rows, False) for layout in (_A2A, _GATHER, _FOUR) for rows in ("right", "left", "bare")),
    *(("falcon", changes_of("falcon", "rw"), layout, "left", False) for layout in (_A2A, _GATHER, _TP)),
    *(("gpt2", {}, layout, "bare", False) for layout in (_FOUR, _GATHER, _TP, replace(_A2A, dp=2))),
    ("gpt_bigcode", {}, _TP, "left", False),
)
"""Family, its fields, layout, kind of rows, and whether it is in every run."""


def _of(case: Any, name: str, always: bool) -> Any:
    return pytest.param(*case, id=name, marks=[] if always else [pytest.mark.exhaustive])


@pytest.mark.parametrize(
    ("family", "changes", "layout", "rows"), [_of(c[:4], f"{c[0]}-{c[2]}-{c[3]}", c[4]) for c in GPTS]
)
def test_a_gpt_equals_hugging_face(family: str, changes: dict[str, Any], layout: Layout, rows: str) -> None:
    check_family(gpt_model(family, changes), layout, gpt_rows(rows))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        _of((model, layout), f"{name}-{layout}", always)
        for name, model, layout, always in (
            ("t5", t5, replace(_PP, pp=2), True),
            ("t5", t5, replace(_GATHER, tp=2, sequence_parallel=True), False),
            ("t5", t5, _GATHER, False),
            ("t5", t5, _FOUR, False),
            ("t5", t5, replace(_FOUR, cp_comm_type="all_gather"), False),
            ("mt5", mt5, replace(_A2A, tp=2, sequence_parallel=True), False),
            ("t5", t5, replace(_PP, vpp=2, recompute="full"), False),
        )
    ],
)
def test_a_t5_equals_hugging_face(model: Any, layout: Layout) -> None:
    check_family(model(), layout, pairs(num_targets=8))


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        _of((name, layout), f"{name}-{layout}", (name, layout) in (("classes", _TP), ("classes of tokens", _PP)))
        for name in ("given positions", "masked_lm", "classes", "classes of tokens", "answers outside the row")
        for layout in (_TP, _PP, _FOUR)
    ],
)
def test_a_bert_equals_hugging_face(case: str, layout: Layout) -> None:
    head, _, rows = BERTS[case]
    check_family(bert_model(*head), layout, rows)


# ---- the kernels of long rows ---------------------------------------------------------------------------------------

_LONG, _EOD = 2048, 3
_WIDE = (("hidden_size", 256), ("head_dim", 64), ("intermediate_size", 512), ("max_position_embeddings", _LONG))


def _train_on_long_rows(case: Case, sliding: bool) -> RankOutcome:
    """Two steps on rows of several documents, whose bounds fall into every rank's runs."""
    from torch.utils.data import DataLoader

    from lightning_megatron import GPTTrainStep

    tokens = torch.randint(4, 83, (2 * case.steps, _LONG), generator=torch.Generator().manual_seed(5))
    tokens[:, [100, 700, 701, 1300, 1900]] = _EOD
    documents = {"eod_token": _EOD, "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    step = GPTTrainStep(**({} if sliding else documents))
    loader: Any = DataLoader([{"input_ids": row} for row in tokens], batch_size=2)  # type: ignore[arg-type]
    return train_module(module_of(case, train_step=step), case, loader)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sliding", [False, True], ids=["documents", "window"])
@pytest.mark.parametrize("how", ["a2a", "all_gather"])
def test_long_rows_train_on_gpus_as_on_one(how: Any, sliding: bool) -> None:
    window = (("model_type", "mistral"), ("sliding_window", 300)) if sliding else ()
    exact = Case(model="llama", model_fields=_WIDE + window, steps=2, accelerator="gpu")
    alone = replace(exact, precision="bf16-mixed")

    def outcome(case: Case) -> Outcome:
        return joined_outcome(run_ranks(_train_on_long_rows, case.layout.world_size, case, sliding), copies_rtol=0.02)

    split = replace(alone, layout=Layout(cp=2, cp_comm_type=how))
    assert_same_within_rounding(outcome(split), outcome(alone), outcome(exact))
