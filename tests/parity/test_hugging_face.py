"""Training in one process equals the Hugging Face model with torch's optimizer: the basis of all comparisons."""

from dataclasses import replace

import pytest

from tests.parity.comparison import assert_same_run
from tests.parity.hugging_face import train_hugging_face, train_in_hugging_face_names
from tests.parity.training import FOUR_RANKS, Case
from tests.ranks import run_ranks

ADAM = (
    ("beta1", 0.8),
    ("beta2", 0.95),
    ("eps", 1e-3),
    ("weight_decay", 0.3),
)
GPT2 = Case(
    model="gpt2",
    labels="uneven",
    steps=3,
    optimizer=(("name", "adamw"), *ADAM),
)
LLAMA = replace(GPT2, model="llama")

CASES = {
    "gpt2": GPT2,
    "llama_tied_mqa": replace(
        LLAMA, model_fields=(("tie_word_embeddings", True), ("num_key_value_heads", 1))
    ),
    "adam": replace(GPT2, optimizer=(("name", "adam"), *ADAM)),
    "sgd": replace(
        GPT2,
        lr=0.05,
        optimizer=(
            ("name", "sgd"),
            ("momentum", 0.7),
            ("weight_decay", 0.3),
        ),
    ),
    "sgd_clipped": replace(
        LLAMA,
        layout=FOUR_RANKS,
        clip=0.5,
        optimizer=(
            ("name", "sgd"),
            ("momentum", 0.7),
            ("weight_decay", 0.3),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_hugging_face_and_torch(name: str) -> None:
    case = CASES[name]
    ours = run_ranks(train_in_hugging_face_names, case.layout.world_size, case)[0]
    (theirs,) = run_ranks(train_hugging_face, 1, case, ours.initial_weights)
    assert_same_run(ours, theirs)
