"""What does the command ``lightning-megatron`` offer? ``main`` and, one file a topic, what its sub-commands need."""

from lightning_megatron.cli.commands import main
from lightning_megatron.cli.program import program

__all__ = ["main", "program"]
