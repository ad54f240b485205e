"""What happens between ``Trainer.fit`` and the first line of the run? Ranks start, and its checkpoint is found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_megatron.engine.launch import announce_launcher
from lightning_megatron.rows_for_copies import rows_for_copies

if TYPE_CHECKING:
    from lightning_megatron.checkpointing import Checkpointing


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the script again for each rank; here the ranks know who started them.

    Where torchrun or a scheduler has started them already, it only calls the function.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks, which end when this process does, then call ``function``.

        Args:
            function: What fits, validates, tests or predicts.
            args: Its arguments; ``ckpt_path`` among them is replaced by the checkpoint that it means.
            trainer: Whose strategy this is the launcher of.
            kwargs: Further arguments of ``function``.

        Raises:
            CheckpointError: If that checkpoint is missing or not complete.
            ConfigError: If copies of the model are left without a row to predict.
        """
        call = inspect.signature(function).bind(*args, **kwargs)
        if trainer is not None and "ckpt_path" in call.signature.parameters:
            call.apply_defaults()
            strategy: Checkpointing = trainer.strategy
            call.arguments["ckpt_path"] = strategy.begin_with(trainer, call.arguments["ckpt_path"])
        with rows_for_copies():
            if self.cluster_environment.creates_processes_externally:
                return function(*call.args, **call.kwargs)
            announce_launcher()
            return super().launch(function, *call.args, trainer=trainer, **call.kwargs)
