"""Detection of what a test leaves behind in its process.

Shared by the guard of the pytest process (conftest.py) and by the ranks (ranks.py). Nothing heavy is imported here: a
library that the test did not load cannot have been changed by it.
"""

import functools
import sys
from typing import Any

_MISSING = object()


class Baseline:
    """The state of torch, Lightning and Megatron at one moment, as far as they are loaded."""

    def __init__(self) -> None:
        self._places, self._switches = _places(), _switches()

    def leaks(self) -> list[str]:
        """What has been changed and not restored since then."""
        now, switches = _places(), _switches()
        found = [f"{owner.__name__}.{name} is patched" for owner, name in self._changed(now)]
        return found + [
            f"torch's {name} is {switches[name]}" for name in self._switches if self._switches[name] != switches[name]
        ]

    def restore(self) -> None:
        """Put back what is patched, and the default dtype, so that one bad test does not fail the next."""
        for owner, name in self._changed(_places()):
            if self._places[owner, name] is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, self._places[owner, name])
        if self._switches:
            sys.modules["torch"].set_default_dtype(self._switches["default dtype"])

    def _changed(self, now: dict[tuple[Any, str], Any]) -> list[tuple[Any, str]]:
        return [place for place, value in self._places.items() if now.get(place, _MISSING) is not value]


def _places() -> dict[tuple[Any, str], Any]:
    """Every place that the strategy patches in a run, and all functions of torch.cuda, as they are now."""
    torch = sys.modules.get("torch")
    table = sys.modules.get("lightning_megatron.engine.patches")
    found = {(torch.cuda, name): each for name, each in vars(torch.cuda).items() if callable(each)} if torch else {}
    for patch in (*table.patches("cpu"), *table.CPU) if table else ():
        if (module := sys.modules.get(patch.module)) is not None:
            *path, name = patch.attribute.split(".")
            owner = functools.reduce(getattr, path, module)
            found[owner, name] = vars(owner).get(name, _MISSING)
    return found


def _switches() -> dict[str, Any]:
    if (torch := sys.modules.get("torch")) is None:
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of function modes": torch.overrides._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }


def process_group_leaks() -> list[str]:
    """Process groups that exist in this process, which are destroyed: fine in a rank, a leak in the pytest process."""
    found = []
    distributed: Any = sys.modules.get("torch.distributed")
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        found.append("megatron.core.parallel_state is initialised; use run_ranks() instead of the pytest process")
        parallel_state.destroy_model_parallel()
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found.append("torch.distributed is initialised; use run_ranks() instead of the pytest process")
        distributed.destroy_process_group()
    return found
