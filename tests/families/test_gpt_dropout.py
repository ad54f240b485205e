"""Numbers are dropped where Hugging Face drops them, with its probabilities, read off one training step of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.families.parity import padded_sentences
from tests.families.test_gpts import CONFIGS
from tests.parity.dropout_masks import Masks, recording
from tests.parity.training import Case, trainer_of
from tests.ranks import run_ranks

_OF_GPT2 = {"embd_pdrop": 0.1, "resid_pdrop": 0.2, "attn_pdrop": 0.3}
_OF_FALCON = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
DROPOUTS: dict[str, dict[str, float]] = {
    "gpt2": _OF_GPT2,
    "gpt_bigcode": _OF_GPT2,
    "llama": {"attention_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "falcon": _OF_FALCON,
    "falcon rw": _OF_FALCON,
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_probabilities_are_hugging_faces_in_its_order(name: str) -> None:
    ((ours, theirs),) = run_ranks(_probabilities, 1, {**CONFIGS[name], **DROPOUTS[name]})
    assert ours == theirs
    assert len(ours) >= 2


def _probabilities(fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Of this package's model and of Hugging Face's."""
    from transformers import AutoModelForCausalLM

    from lightning_megatron import MegatronModule
    from lightning_megatron.convert.registry import config_object

    rows = padded_sentences()
    model = AutoModelForCausalLM.from_config(config_object(fields)).train()
    ours, theirs = Masks(), Masks()
    with recording(theirs):
        model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    module = MegatronModule(model=fields, make_vocab_size_divisible_by=8)
    trainer = trainer_of(Case(steps=1))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows))  # type: ignore[arg-type]
    with recording(ours):
        trainer.fit(module, loader)
    return ours.probabilities, theirs.probabilities
