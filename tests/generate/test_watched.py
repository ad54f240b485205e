"""``on_tokens`` gets each token once, in every layout, and nothing of rows that ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.generate.models import Call, hugging_face, prompts, run_with_models, set_up
from tests.parity.training import Case, Layout

NEW = 12


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2)], ids=str)
def test_each_token_is_shown_once(layout: Layout) -> None:
    ids, mask = prompts()
    expected = hugging_face("gpt2").generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=1
    )[:, ids.shape[1] :]
    # Of the first row the third token ends a text, whichever that is.
    end = int(expected[0, 2])
    rows = [row[: row.index(end) + 1] if end in row else row for row in expected.tolist()]
    assert len({len(row) for row in rows}) > 1
    call = Call(model="gpt2", input_ids=ids, attention_mask=mask, options={"max_new_tokens": NEW, "eos_token_id": end})
    for dp_rank, seen in run_with_models(_seen, layout, [call]):
        own = rows[dp_rank * len(rows) // layout.dp : (dp_rank + 1) * len(rows) // layout.dp]
        assert [[token for token in row if token >= 0] for row in seen] == own
        assert all(token == -1 for row, text in zip(seen, own, strict=True) for token in row[len(text) :])


def _seen(directory: str, case: Case, calls: list[Call]) -> tuple[int, list[list[int]]]:
    from lightning_megatron.errors import ConfigError

    (call,) = calls
    module = set_up(directory, case, "gpt2")
    steps: list[torch.Tensor] = []
    arguments: dict[str, Any] = {"attention_mask": call.attention_mask, **call.options}
    module.generate(call.input_ids, on_tokens=steps.append, **arguments)
    # Asked for on one rank, refused on all.
    watched = steps.append if module.trainer.is_global_zero else None
    with pytest.raises(ConfigError, match="on_tokens shows texts while they grow, and a search with num_beams=2"):
        module.generate(call.input_ids, on_tokens=watched, num_beams=2, **arguments)
    return module.megatron.topology.dp_rank, torch.stack(steps, dim=1).tolist()
