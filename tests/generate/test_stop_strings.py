"""Stop strings end rows where Hugging Face's generate ends them, on every rank of every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families.parity import VOCAB_SIZE
from tests.generate.models import NO_END, asked, by_hugging_face, compare, prompts
from tests.generate.readable import byte_level_tokenizer
from tests.parity.training import Layout


def _tokenizer(said: dict[int, bytes]) -> Any:
    """One with which tokens read as ``said``, and all others in a way that ends nothing."""
    return byte_level_tokenizer({token: said.get(token, f"<{token}>".encode()) for token in range(VOCAB_SIZE)})


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), pytest.param(Layout(dp=2), marks=pytest.mark.exhaustive)], ids=str
)
def test_texts_end_where_hugging_faces_do(layout: Layout) -> None:
    ids, mask = prompts(lengths=(7, 4, 6, 5))
    plain: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 1} | NO_END
    new = by_hugging_face(asked("mistral", (ids, mask), **plain))[:, 7:].tolist()
    # A character of two tokens; inside of one; half in the prompt; over three, and the last says more.
    said = {new[0][4]: b"x\xc3", new[0][5]: b"\xa9", new[1][3]: b"abcd", int(ids[2, -1]): b"st", new[2][0]: b"opera"}
    said |= {new[3][1]: b" 0.", new[3][2]: b"1.", new[3][3]: b"2.3"}
    assert len(said) == 8
    plain |= {"stop_strings": ("é", "bc", "stop", "0.1.2"), "tokenizer": _tokenizer(said)}
    ending = {**plain, "eos_token_id": (new[0][2],)}
    beams = {**plain, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    # A token that ends texts, too, and a length that only holds back the latter.
    calls = [asked("mistral", (ids, mask), **o) for o in (plain, ending, {**ending, "min_new_tokens": 5}, beams)]
    alone = by_hugging_face(calls[0])[:, 7:].tolist()
    assert [row.index(1) if 1 in row else len(row) for row in alone] == [6, 4, 1, 4]
    assert by_hugging_face(calls[1])[0, 7:].tolist().index(1) == 3
    assert set(by_hugging_face(calls[2])[2, 8:].tolist()) == {1}
    assert by_hugging_face(calls[3])[:, -1].eq(1).any()
    compare(calls, layout)


def test_a_t5s_texts_do() -> None:
    rows = prompts("right", lengths=(7, 4))
    begun = {"decoder_input_ids": torch.tensor([[2, 5], [2, 6]]), "max_new_tokens": 8, "pad_token_id": 3} | NO_END
    plain = by_hugging_face(asked("t5_1_1", rows, **begun)).tolist()
    tokenizer = _tokenizer({5: b"sto", plain[0][2]: b"p", plain[1][4]: b"stop"})
    call = asked("t5_1_1", rows, **begun, stop_strings="stop", tokenizer=tokenizer)
    assert by_hugging_face(call)[:, 3:].tolist() == [[3, 3], plain[1][3:5]]
    compare([call], Layout(pp=2))
