"""Imported by the process that ranks are forked from, and by nothing else: what most rank functions need is ready.

A module that is broken is passed over here: the rank's own import shows the error.
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
    importlib.import_module("lightning_megatron.convert.registry").known_families()  # imports each family
# A collection would visit every imported object again in each rank (0.3 s); saving a checkpoint collects.
gc.freeze()
# A fork must find no thread that may hold a lock, and no CUDA, which a forked rank could not use.
torch = sys.modules.get("torch")
if threading.active_count() > 1 or (torch is not None and torch.cuda.is_initialized()):
    raise SystemExit("an import has started a thread or initialised CUDA: preload less")
