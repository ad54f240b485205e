"""``python -m lightning_megatron``: same as the command ``lightning-megatron``."""

from lightning_megatron.cli import program

if __name__ == "__main__":
    program()
