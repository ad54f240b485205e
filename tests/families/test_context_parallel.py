"""Context parallelism on long rows on GPUs, with packed documents and windows; layouts are in the families' tables."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.comparison import assert_same_within_rounding
from tests.parity.training import Case, Layout, Outcome, join_outcomes, module_of, train_module
from tests.ranks import run_ranks

_LONG = 2048
_EOD = 3
_WIDE = (
    ("hidden_size", 256),
    ("head_dim", 64),
    ("intermediate_size", 512),
    ("max_position_embeddings", _LONG),
)


def _train_on_long_rows(case: Case, sliding: bool) -> Outcome:
    """Train two steps on rows of several documents, with boundaries in every rank's part of the sequence."""
    from torch.utils.data import DataLoader

    from lightning_megatron import GPTTrainStep

    tokens = torch.randint(
        4,
        83,
        (2 * case.steps, _LONG),
        generator=torch.Generator().manual_seed(5),
    )
    tokens[:, [100, 700, 701, 1300, 1900]] = _EOD
    documents: dict[str, Any] = {
        "eod_token": _EOD,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
    }
    step = GPTTrainStep(**({} if sliding else documents))
    loader: Any = DataLoader([{"input_ids": row} for row in tokens], batch_size=2)  # type: ignore[arg-type]
    return train_module(module_of(case, train_step=step), case, loader)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "sliding",
    [False, True],
    ids=["documents", "window"],
)
@pytest.mark.parametrize("how", ["a2a", "all_gather"])
def test_long_rows_on_two_gpus_equal_one_gpu(how: Any, sliding: bool) -> None:
    window = (("model_type", "mistral"), ("sliding_window", 300)) if sliding else ()
    exact = Case(
        model="llama",
        model_fields=_WIDE + window,
        steps=2,
        accelerator="gpu",
    )
    one_gpu = replace(exact, precision="bf16-mixed")

    def outcome(case: Case) -> Outcome:
        return join_outcomes(
            run_ranks(_train_on_long_rows, case.layout.world_size, case, sliding), copies_rtol=0.02
        )

    sharded = replace(one_gpu, layout=Layout(cp=2, cp_comm_type=how))
    assert_same_within_rounding(outcome(sharded), outcome(one_gpu), outcome(exact))
