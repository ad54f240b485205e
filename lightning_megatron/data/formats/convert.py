"""How does a dataset of Megatron 1.x or 2.x ("cached", "lazy") become one that Megatron-Core maps into memory?

The tokens are the same bytes in both; only the index is written anew.
"""

from __future__ import annotations

from lightning_megatron.data.formats.legacy import check_legacy_dataset
from lightning_megatron.data.formats.rewrite import RewrittenDataset, rewrite
from lightning_megatron.data.formats.staged import require_new


def convert_dataset(source: str, output_prefix: str) -> RewrittenDataset:
    """Write the legacy dataset at ``source`` in the mmap format; the files appear when both are complete.

    Documents, sequences and the type of tokens stay as they are.

    Raises:
        DataError: If ``source`` is missing, damaged, foreign or has a sequence too long for the mmap format, or
            ``output_prefix`` exists or cannot be written.
    """
    require_new(output_prefix)
    header = check_legacy_dataset(source)
    return rewrite([header], output_prefix, header.dtype, "Converting")
