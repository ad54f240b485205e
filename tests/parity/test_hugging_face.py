"""One process trains as Hugging Face's model and torch's optimizer do: the root of all comparisons."""

from dataclasses import replace

import pytest

from tests.parity.comparison import assert_same_run
from tests.parity.hugging_face import outcome_in_hugging_face_names, train_hugging_face
from tests.parity.training import Case, Layout
from tests.ranks import run_ranks

ADAM = (("beta1", 0.8), ("beta2", 0.95), ("eps", 1e-3), ("weight_decay", 0.3))
GPT2 = Case(model="gpt2", labels="uneven", steps=3, optimizer=(("name", "adamw"), *ADAM))
LLAMA = replace(GPT2, model="llama")

CASES = {
    "gpt2": GPT2,
    "gpt2_untied": replace(GPT2, model_fields=(("tie_word_embeddings", False),)),
    "gpt2_exact_gelu": replace(GPT2, model_fields=(("activation_function", "gelu"), ("n_inner", 48))),
    "llama": LLAMA,
    "llama_tied_mqa": replace(LLAMA, model_fields=(("tie_word_embeddings", True), ("num_key_value_heads", 1))),
    "llama_of_3_1": replace(LLAMA, model="llama_of_3_1"),
    "clipped": replace(GPT2, clip=0.5),
    "adam": replace(GPT2, optimizer=(("name", "adam"), *ADAM)),
    "sgd": replace(GPT2, lr=0.05, optimizer=(("name", "sgd"), ("momentum", 0.7), ("weight_decay", 0.3))),
    "sgd_clipped": replace(
        LLAMA,
        layout=Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
        clip=0.5,
        optimizer=(("name", "sgd"), ("momentum", 0.7), ("weight_decay", 0.3)),
    ),
}


IN_EVERY_RUN = ("gpt2", "llama_tied_mqa", "adam", "sgd", "sgd_clipped")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive] * (name not in IN_EVERY_RUN), id=name)
        for name, case in CASES.items()
    ],
)
def test_a_run_is_that_of_hugging_face_and_torch(case: Case) -> None:
    ours = outcome_in_hugging_face_names(case)
    (theirs,) = run_ranks(train_hugging_face, 1, case, ours.initial_weights)
    assert_same_run(ours, theirs)
