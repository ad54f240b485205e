"""A process of ``lightning-megatron verify``, which starts it with the folder of its job; not for users."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from lightning_megatron import errors
from lightning_megatron.run.ranks import die_with_launcher
from lightning_megatron.verify.job import Job
from lightning_megatron.verify.ranks import run_layout
from lightning_megatron.verify.reference import run_reference


def main(folder: Path) -> int:
    """Compute the job of ``folder``, and return the exit code."""
    die_with_launcher()
    try:
        if Job.read(folder).layout is None:
            run_reference(folder)
        else:
            run_layout(folder)
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    except Exception as error:
        message = errors.user_error(error)
        if message is None:
            traceback.print_exc()
            return 1
        return errors.report(message)
    return errors.DONE


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not exit: gloo's threads may wait for ranks that have ended.
        os._exit(code)
