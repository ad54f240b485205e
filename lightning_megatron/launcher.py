"""How do the other ranks of this machine start, where neither torchrun nor a scheduler starts them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_megatron.engine.launch import announce_launcher


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the script again for each rank; here the ranks know who started them."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks, which end when this process does, then call ``function``."""
        if not self.cluster_environment.creates_processes_externally:
            announce_launcher()
        return super().launch(function, *args, trainer=trainer, **kwargs)
