"""Detection of global state that a test leaks: patches, torch settings, process groups.

Used for the pytest process (conftest.py) and for ranks (ranks.py). Imports nothing heavy: a test cannot have changed a
library that it did not load.
"""

import functools
import sys
from typing import Any

_MISSING = object()


class Baseline:
    """Snapshot of the patchable attributes and settings of torch, Lightning and Megatron, as far as they are loaded."""

    def __init__(self) -> None:
        self._attributes = _attributes()
        self._settings = _settings()

    def leaks(self) -> list[str]:
        """Changes since the snapshot."""
        settings = _settings()
        patched = [f"{owner.__name__}.{name} is patched" for owner, name in self._changed()]
        changed = [name for name in self._settings if self._settings[name] != settings[name]]
        return patched + [f"torch's {name} is {settings[name]}" for name in changed]

    def restore(self) -> None:
        """Undo patches and restore the default dtype, so that one bad test does not fail the next."""
        for owner, name in self._changed():
            if self._attributes[owner, name] is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, self._attributes[owner, name])
        if self._settings:
            sys.modules["torch"].set_default_dtype(self._settings["default dtype"])

    def _changed(self) -> list[tuple[Any, str]]:
        now = _attributes()
        return [
            key for key, value in self._attributes.items() if now.get(key, _MISSING) is not value
        ]


def _attributes() -> dict[tuple[Any, str], Any]:
    """Current values of all attributes that the strategy patches in a run, and of all functions of torch.cuda."""
    torch = sys.modules.get("torch")
    table = sys.modules.get("lightning_megatron.engine.patches")
    values = (
        {(torch.cuda, name): each for name, each in vars(torch.cuda).items() if callable(each)}
        if torch
        else {}
    )
    for patch in (*table.patches("cpu"), *table.CPU) if table else ():
        if (module := sys.modules.get(patch.module)) is not None:
            *path, name = patch.attribute.split(".")
            owner = functools.reduce(getattr, path, module)
            values[owner, name] = vars(owner).get(name, _MISSING)
    return values


def _settings() -> dict[str, Any]:
    if (torch := sys.modules.get("torch")) is None:
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of function modes": torch.overrides._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }


def process_group_leaks() -> list[str]:
    """Destroy and report process groups of the pytest process, where they are leaks; in a rank they are fine."""
    leaks = []
    distributed: Any = sys.modules.get("torch.distributed")
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        leaks.append(
            "megatron.core.parallel_state is initialised; use run_ranks() instead of the pytest process"
        )
        parallel_state.destroy_model_parallel()
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        leaks.append(
            "torch.distributed is initialised; use run_ranks() instead of the pytest process"
        )
        distributed.destroy_process_group()
    return leaks
