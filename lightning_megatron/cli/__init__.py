"""What does the command ``lightning-megatron`` offer? ``main`` and, one file a topic, what its sub-commands need."""

from lightning_megatron.cli.commands import main

__all__ = ["main"]
