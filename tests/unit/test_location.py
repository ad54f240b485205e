"""Where a rank is, by the frames of its main thread."""

from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from tests.ranks import run_ranks


def _located(line: int | None) -> str:
    """Text about a frame of a user's function that is at ``line``, as Python may give it to another thread."""
    from lightning_megatron.run.location import locate

    code = compile("def compute():\n    pass", "/home/user/train.py", "exec")
    (function,) = (each for each in code.co_consts if isinstance(each, CodeType))
    frame: Any = SimpleNamespace(
        f_code=function, f_lineno=line, f_globals={"__name__": "train"}, f_locals={}
    )
    return locate([frame]).text


@pytest.mark.parametrize(("line", "shown"), [(2, 2), (None, 1)])
def test_frame_without_a_line_is_located_at_its_function(line: int | None, shown: int) -> None:
    (text,) = run_ranks(_located, 1, line)
    assert text == f"at (user/train.py:{shown} in compute)"
