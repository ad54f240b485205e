"""Extract and run the code blocks of documentation pages."""

import os
import re
import shlex
from typing import Any

from tests.ranks import ROOT


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of ``page``, a path in the repository."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$",
        (ROOT / page).read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )


def commands(page: str) -> list[list[str]]:
    """Words of every shell line, without comments."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def execute(
    page: str,
    number: int,
    folder: str,
    changes: dict[str, str],
    **variables: Any,
) -> dict[str, Any]:
    """Run a Python block in ``folder`` with text replaced by ``changes``; returns ``variables`` and the block's own."""
    os.chdir(folder)
    code = blocks(page, "python")[number]
    for shown, smaller in changes.items():
        assert code.count(shown) == 1, f"{page} no longer shows {shown} once"
        code = code.replace(shown, smaller)
    exec(compile(code, page, "exec"), variables)
    return variables


def token_loader() -> Any:
    """Two batches of four rows of 16 tokens."""
    import torch
    from torch.utils.data import DataLoader

    rows: Any = [{name: torch.arange(16) for name in ("input_ids", "labels")} for _ in range(8)]
    return DataLoader(rows, batch_size=4)
