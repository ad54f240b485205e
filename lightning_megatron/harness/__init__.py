"""Evaluation by EleutherAI's lm_eval: a live model as its ``LM``, its tasks read from this disk, and their evaluation.

What only needs a model belongs to ``generate``, command line and callback to ``cli`` and ``callbacks``. It may import
``generate`` and what lies below it. ``HarnessOptions`` is defined here, without heavy imports, because the command line
is generated from it; lm_eval is imported when it is used, since it is an extra.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.errors import ConfigError, require_number

_SUPPORTED = ((0, 4, 12), (0, 5))
"""First version of lm_eval that works, and the first that is not tried (pyproject.toml says why)."""


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """Which tasks are evaluated, and how; named as in lm_eval."""

    tasks: Sequence[str]
    """Tasks, groups or tags of lm_eval, patterns such as mmlu_*, or paths of task YAMLs; also separated by commas."""
    include_path: Sequence[Path] = ()
    """Directories with more task YAMLs."""
    trust_task_code: bool = False
    """Run the Python functions (!function) and Hugging Face metrics that task YAMLs of yours name; those of lm_eval
    run anyway."""
    num_fewshot: int | None = None
    """Examples in the context (default: as each task says)."""
    limit: float | None = None
    """Documents per task, or their share if below 1 (default: all)."""
    apply_chat_template: bool = False
    """Write prompts with the tokenizer's chat template."""
    fewshot_as_multiturn: bool = False
    """With a chat template, write examples as turns of a conversation."""
    system_instruction: str | None = None
    """System message before the prompts."""
    bootstrap_iters: int = 100000
    """Resamples for standard errors that have no formula; 0 for no standard errors."""
    seed: int = 1234
    """Seed that selects the examples."""

    def __post_init__(self) -> None:
        """Validate what needs no task.

        Raises:
            ConfigError: If a number is out of range, there is no task, or an option has no effect.
        """
        if not self.task_names:
            raise ConfigError("tasks: expected a name or path, got none; give at least one")
        if self.num_fewshot is not None:
            require_number("num_fewshot", self.num_fewshot)
        if self.limit is not None:
            require_number("limit", self.limit)
        if self.limit == 0:
            raise ConfigError("limit=0 must be above 0; leave it out for all documents")
        require_number("bootstrap_iters", self.bootstrap_iters)
        require_number("seed", self.seed)
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ConfigError(
                "fewshot_as_multiturn=True is for chats; set apply_chat_template, or leave it out"
            )

    @property
    def task_names(self) -> list[str]:
        """The tasks, without commas."""
        tasks = [self.tasks] if isinstance(self.tasks, str) else self.tasks
        names = [name.strip() for each in tasks for name in str(each).split(",")]
        return [name for name in names if name]


def require_lm_eval() -> None:
    """Check that lm_eval is installed, in a version that works.

    Raises:
        ConfigError: If not.
    """
    install = "run `pip install 'lightning-megatron[eval]'`"
    first, end = (".".join(map(str, version)) for version in _SUPPORTED)
    try:
        version = importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"lm_eval: expected a version from {first} to below {end}, got none; {install}"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not _SUPPORTED[0] <= numbers < _SUPPORTED[1]:
        raise ConfigError(
            f"lm_eval: expected a version from {first} to below {end}, got {version}; {install}"
        )
