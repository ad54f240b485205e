"""Targets that padding would predict are announced: its hidden states are other than those of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.steps.bert import BertTrainStep
from lightning_megatron.steps.classification import ClassificationTrainStep
from lightning_megatron.steps.gpt import GPTTrainStep
from tests.recording import recorded_warnings
from tests.unit.models.test_t5_layout import MODEL as TINY

GPT = replace(
    TINY,
    family="gpt2",
    architecture="gpt",
    vocab_size=7,
    max_position_embeddings=4,
    num_tokentypes=0,
)
BERT = replace(GPT, family="megatron-bert", architecture="bert", num_tokentypes=2)
TOKENS: dict[str, Any] = {
    "task": "token_classification",
    "num_labels": 3,
    "problem_type": "single_label_classification",
}
STEPS = {
    "gpt": (GPTTrainStep(), GPT),
    "gpt, tokens": (ClassificationTrainStep(), replace(GPT, **TOKENS)),
    "bert": (BertTrainStep(), replace(BERT, task="masked_lm")),
    "bert, tokens": (BertTrainStep(), replace(BERT, **TOKENS)),
}


@pytest.mark.parametrize("name", STEPS)
def test_targets_at_padding_are_announced(name: str) -> None:
    step, model = STEPS[name]
    step.bind(model)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])

    def warned(*ignored: int, **options: Any) -> bool:
        labels = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1]])
        labels[0, list(ignored)] = -100
        batch = {"input_ids": torch.ones_like(mask), "attention_mask": mask, "labels": labels}
        with recorded_warnings("padding") as messages:
            step.check_batch({**batch, **options})
        return messages != []

    assert warned()
    assert not warned(2, 3)
    assert not warned(loss_mask=mask.float())
    # The first label of padding is what the last token predicts: the token that ends a text.
    assert warned(3) == (name != "gpt")
