"""Command-line interface: the command ``lightning-megatron``.

Parsing, questions and printed reports belong here; what a command does lies in the packages below, where scripts can
call it, too. Imports everything, slow parts only when a command runs.
"""

from lightning_megatron.cli.commands import main, program

__all__ = ["main", "program"]
