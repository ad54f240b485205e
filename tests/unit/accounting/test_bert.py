"""Do a BERT's counts agree with transformers' models and with arithmetic by hand?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_megatron.accounting.flops import model_flops_per_token
from lightning_megatron.accounting.parameters import rank_parameters, total_parameters
from lightning_megatron.models.config import ModelConfig


def bert(num_layers: int, hidden_size: int, num_attention_heads: int, task: str, num_labels: int = 2) -> ModelConfig:
    return ModelConfig(
        family="megatron-bert",
        architecture="bert",
        task=task,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_attention_heads,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=29056,
        max_position_embeddings=512,
        num_tokentypes=2,
        num_labels=num_labels,
    )


CLASSES = {
    "pretraining": "PreTraining",
    "masked_lm": "MaskedLM",
    "sequence_classification": "SequenceClassification",
    "token_classification": "TokenClassification",
    "question_answering": "QuestionAnswering",
}


@pytest.mark.parametrize("task", CLASSES)
def test_total_equals_that_of_transformers_models(task: str) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    config = transformers.MegatronBertConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, num_labels=5
    )
    with torch.device("meta"):
        theirs = getattr(transformers, f"MegatronBertFor{CLASSES[task]}")(config)
    assert total_parameters(bert(3, 24, 4, task, num_labels=5)) == sum(p.numel() for p in theirs.parameters())


def test_ranks_hold_the_whole_and_a_copy_of_the_tied_embedding() -> None:
    model = replace(bert(4, 32, 4, "pretraining"), vocab_size=29056 - 100)
    padded = model.padded_vocab_size(1)
    assert padded == 29056
    # Padding has a row in the embedding and in the output layer's bias.
    padding = 100 * (32 + 1)
    assert rank_parameters(model, tp=1, pp=1, pp_rank=0) == total_parameters(model) + padding
    stages = sum(rank_parameters(model, tp=1, pp=2, pp_rank=rank) for rank in range(2))
    assert stages == total_parameters(model) + padding + padded * 32
    classifier = replace(model, task="sequence_classification")
    stages = sum(rank_parameters(classifier, tp=1, pp=2, pp_rank=rank) for rank in range(2))
    assert stages == total_parameters(classifier) + 100 * 32


def test_operations_count_all_keys_and_the_head() -> None:
    h, layers, s, v = 1024, 24, 512, 29056
    per_layer = 12 * h * h + 2 * s * h
    lm = h * h + h * v
    row = (h * h + 2 * h) / s
    pretraining = bert(layers, h, 16, "pretraining")
    assert model_flops_per_token(pretraining, s, v) == pytest.approx(6 * (layers * per_layer + lm + row))
    assert model_flops_per_token(pretraining, s, v, "full") == model_flops_per_token(pretraining, s, v)
    classifier = bert(layers, h, 16, "sequence_classification")
    assert model_flops_per_token(classifier, s, v) == pytest.approx(6 * (layers * per_layer + row))
    tokens = bert(layers, h, 16, "token_classification", num_labels=9)
    assert model_flops_per_token(tokens, s, v) == pytest.approx(6 * (layers * per_layer + 9 * h))
