"""Options of other tools: errors name our equivalent option, and every option in the table exists."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks, loggers

import lightning_megatron
from lightning_megatron import (
    ConfigError,
    GenerationOptions,
    LRSchedule,
    MegatronModule,
    MegatronStrategy,
)
from lightning_megatron.cli.commands import build_parser
from lightning_megatron.foreign_names import PROG, foreign_names

_WORDS = ("", "CUDA_VISIBLE_DEVICES", "seed_everything")


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            MegatronStrategy,
            {"tensor_model_parallel_size": 2},
            "MegatronStrategy has no option .*; use tp$",
        ),
        (
            MegatronStrategy,
            {"gradient_clipping": 1.0},
            r"use Trainer\(gradient_clip_val=\.\.\.\), 0 disables",
        ),
        (
            MegatronStrategy,
            {"load_data_on_every_rank": True},
            "leave it out: one rank of each replica reads",
        ),
        (MegatronStrategy, {"tpp": 2}, r"did you mean tp\?$"),
        (
            MegatronStrategy,
            {"sequence_parallel": "false"},
            "='false' must be True or False, and is a str",
        ),
        (
            MegatronModule,
            {"model": {"model_type": "gpt2"}, "min_lr": 0.1},
            r"use LRSchedule\(min_lr=\.\.\.\)",
        ),
        (LRSchedule, {"lr_decay_style": "cosine"}, "use style,"),
        (GenerationOptions, {"add_BOS": True}, "use bos_token_id, the token"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_option_of_another_tool_is_refused_with_ours(
    build: Callable[..., Any], options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_options_in_the_table_exist_and_are_unique_per_tool() -> None:
    names = [(tool, row.theirs) for row in foreign_names() for tool in row.used_by.split()]
    assert len(set(names)) == len(names)

    _, commands = build_parser()
    homes = (lightning_megatron, pl, callbacks, loggers)
    for row in foreign_names():
        if row.ours.startswith(PROG):
            command, *flags = row.ours.removeprefix(PROG).split()
            assert set(flags) <= commands[command]._option_string_actions.keys(), row
        elif row.ours not in _WORDS and not row.ours.startswith("torchrun"):
            name, _, attribute = row.ours.partition("(")[0].partition(".")
            owner = next(getattr(home, name) for home in homes if hasattr(home, name))
            target = getattr(owner, attribute) if attribute else owner
            assert row.option is None or row.option in inspect.signature(target).parameters, row
