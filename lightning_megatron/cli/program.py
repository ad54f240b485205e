"""How does the command end? With the exit code of ``main``, whatever threads are still connected to other ranks."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from lightning_megatron.cli.commands import main
from lightning_megatron.cli.failure import DONE, INTERRUPTED


def program() -> NoReturn:
    """Run the command line of this process and end it."""
    code = main()
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only interrupt the end, with a traceback
    if code != DONE and _is_connected():
        # gloo's threads wait for ranks that have ended too; destroying them with the interpreter can abort (code 134).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_connected() -> bool:
    # Looked up, not imported: torch takes seconds, and if Ctrl-C has ended its import, a second one fails.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())
