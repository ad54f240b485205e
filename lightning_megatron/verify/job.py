"""What the processes of a verification get and return, in files of a temporary directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.verify import DtypeName

_JOB = "job.json"
_RESULT = "result.pt"
_PROGRESS = "progress.txt"
DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the reference or a layout computes."""

    directory: str
    """Hugging Face model directory."""
    layout: str | None
    """Name of the layout; None for transformers."""
    accelerator: str
    """``cpu`` or ``gpu``."""
    dtype: DtypeName
    checks: tuple[str, ...]
    batch_size: int
    seq_length: int
    steps: int
    seed: int
    pad_token_id: int | None
    """Padding token of the config, whose embedding gets no gradient in transformers."""
    samples: int
    """Most elements of each gradient that are compared."""

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return "gradients" in self.checks or "speed" in self.checks

    @property
    def needs_reference(self) -> bool:
        """Whether anything is compared with transformers: the round trip is not."""
        return self.checks != ("round-trip",)

    def write(self, folder: Path) -> None:
        """Write the job for the processes that are started with ``folder``."""
        (folder / _JOB).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read what ``write`` has written."""
        values = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        return cls(**{**values, "checks": tuple(values["checks"])})


@dataclass(kw_only=True)
class Result:
    """What transformers or a layout computed, on the host; None or empty for what was not asked."""

    logits: torch.Tensor | None = None
    """[b, s, v] or [b, n], fp32."""
    loss: float | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sampled elements of each gradient, fp32, by Hugging Face name; see ``sampled``."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each gradient."""
    tokens: torch.Tensor | None = None
    """[b, s + new]: prompts with their continuation."""
    token_logits: torch.Tensor | None = None
    """Of transformers only: [b, new, v], fp32, logits from which each new token was chosen."""
    seconds: list[float] = field(default_factory=list)
    """Time of each forward and backward pass."""
    attention: str = ""
    """Of transformers only: the attention that was timed."""
    num_tensors: int = 0
    """Tensors of the round trip."""
    wrong_tensors: list[str] = field(default_factory=list)
    """What differs in the round trip, one line a tensor."""
    left_out: list[str] = field(default_factory=list)
    """Tensors of the directory that belong to another head."""

    def write(self, folder: Path, name: str = _RESULT) -> None:
        """Write the result for the process that reads ``folder``."""
        torch.save({each.name: getattr(self, each.name) for each in fields(self)}, folder / name)

    @classmethod
    def read(cls, folder: Path, name: str = _RESULT) -> Result:
        """Read what ``write`` has written."""
        values: dict[str, Any] = torch.load(folder / name, weights_only=True)
        return cls(**values)


class Progress:
    """Lines of a process about what it is doing, which the command shows."""

    def __init__(self, folder: Path) -> None:
        """Write to, or read from, ``folder``."""
        self._path = folder / _PROGRESS
        self._num_read = 0

    def say(self, text: str) -> None:
        """Append a line; for one rank."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def read(self) -> list[str]:
        """New complete lines since the last call."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        complete = [line.strip() for line in lines if line.endswith("\n")]
        new = complete[self._num_read :]
        self._num_read = len(complete)
        return new
