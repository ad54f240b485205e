"""Documents of a packed row are learned as if each stood in a row of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.parity.hugging_face import hugging_face_model
from tests.parity.logits import Answer, Rows, answer, whole_logits
from tests.parity.sharding import Tensors
from tests.parity.training import VOCAB_SIZE, Case, Layout, Sentences
from tests.ranks import run_ranks

EOD = 3
ENDS = ((4, 9), (15,), (0, 1, 7, 15), ())
OPTIONS = {"eod_token": EOD, "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}

# The logits are about 1 in size and come out of four layers, with rows of another length in another order of additions.
ATOL = 1e-5


def _packed() -> list[torch.Tensor]:
    rows = []
    for row, ends in zip(Sentences(len(ENDS)), ENDS, strict=True):
        tokens = row["input_ids"].masked_fill(row["input_ids"] == EOD, EOD + 1)
        tokens[list(ends)] = EOD
        rows.append(tokens)
    return rows


def _alone(case: Case, weights: Tensors, rows: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Logits [b, s, v] and the mean loss, from Hugging Face's model, which sees one document at a time."""
    model = hugging_face_model(case, weights).eval()
    logits, losses = [], []
    for tokens in rows:
        ends = [i + 1 for i, token in enumerate(tokens.tolist()) if token == EOD]
        for document in torch.tensor_split(tokens, ends):
            if len(document):
                with torch.no_grad():
                    logits.append(model(input_ids=document[None]).logits[0])
                losses.append(F.cross_entropy(logits[-1][:-1], document[1:], reduction="none"))
    return torch.cat(logits).unflatten(0, (len(rows), -1)), torch.cat(losses).mean().item()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)),
        ("llama", Layout(pp=2, vpp=2, num_microbatches=2)),
        pytest.param("gpt2", Layout(cp=2), marks=pytest.mark.exhaustive),
        ("llama", Layout(cp=4)),
    ],
    ids=str,
)
def test_packed_documents_are_learned_as_rows_of_their_own(model: str, layout: Layout) -> None:
    case, tokens = Case(model=model, layout=layout), _packed()
    rows: Rows = [{"input_ids": row} for row in tokens]
    answers: list[Answer] = run_ranks(answer, layout.world_size, case, rows, OPTIONS)
    ((logits, loss),) = run_ranks(_alone, 1, case, answers[0].weights, tokens)
    # The ranks of a cp group return the same.
    one_of_each = [a for i, a in enumerate(answers) if i // layout.tp % layout.cp == 0]
    torch.testing.assert_close(whole_logits(one_of_each)[..., :VOCAB_SIZE], logits, rtol=0, atol=ATOL)
    assert [a.loss for a in answers] == pytest.approx([loss] * len(answers), rel=1e-6)
