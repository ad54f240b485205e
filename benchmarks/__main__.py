"""``python -m benchmarks``: the same as ``python -m benchmarks.train_step``."""

import sys

from benchmarks.train_step import main

sys.exit(main())
