"""What does ``python -m lightning_megatron`` do? The same as the command ``lightning-megatron``."""

import sys

from lightning_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
