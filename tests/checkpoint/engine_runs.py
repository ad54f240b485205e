"""A run whose engine saves and loads by itself, without Lightning's checkpoints around it.

For rank functions: nothing here is heavy before it is called.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.checkpoint.runs import Run, fit

RUN = Run(strategy={"num_microbatches": 1}, trainer={"max_steps": 1}, model={"n_layer": 2})
"""One step, on as many copies as there are ranks."""


@contextlib.contextmanager
def engine_run(run: Run) -> Iterator[Any]:
    """What ``run`` has become after its steps, as a ``RunState``, inside the engine."""
    trainer, _ = fit(run)
    with trainer.strategy.engine():
        yield trainer.strategy._run_state()


def change(state: Any) -> None:
    """Weights, masters and moments become others, in place and the same way in every process."""
    import torch

    with torch.no_grad():
        for chunk in state.chunks:
            for parameter in chunk.parameters():
                parameter.add_(1.0)
        for part in state.optimizer.parts:
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    master.add_(0.5)
                    for moment in part.optimizer.state.get(master, {}).values():
                        moment.add_(0.25)
    torch.rand(3)


def save(state: Any, content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of ``state`` with ``content`` in place of Lightning's dict."""
    begin_save(state, content, path, in_place=True).finish()


def begin_save(state: Any, content: dict[str, Any], path: Path, *, in_place: bool = False) -> Any:
    """Begin to write one beside training; returns the ``Save``."""
    from lightning_megatron.checkpoint.save import HostMemory, Save

    saving = Save(state, {**content, "optimizer_states": []}, path)
    saving.start(HostMemory(in_place=in_place))
    return saving
