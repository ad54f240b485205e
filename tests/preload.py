"""Imports for the process that ranks are forked from: modules that most rank functions need.

A broken module is skipped here: the rank's own import shows the error.
"""

import contextlib
import gc
import importlib
import os
import sys
import threading

from tests.ranks import PRELOADED, die_with_parent

die_with_parent(os.getppid())
for name in PRELOADED:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
with contextlib.suppress(Exception):
    importlib.import_module(
        "lightning_megatron.convert.registry"
    ).known_families()  # imports each family
# Otherwise garbage collection visits every imported object in each rank (0.3 s); saving a checkpoint collects.
gc.freeze()
# Forking is unsafe with other threads, which may hold locks, and with CUDA, which a forked rank could not use.
torch = sys.modules.get("torch")
if threading.active_count() > 1 or (torch is not None and torch.cuda.is_initialized()):
    raise SystemExit("an import started a thread or initialised CUDA: preload fewer modules")
