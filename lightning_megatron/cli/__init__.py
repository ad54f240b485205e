"""Command-line interface: the command ``lightning-megatron``."""

from lightning_megatron.cli.commands import main, program

__all__ = ["main", "program"]
