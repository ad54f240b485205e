"""Which dataset is at a prefix, in whichever format?"""

from __future__ import annotations

from lightning_megatron.data.formats.index_files import LEGACY_MAGIC, DatasetHeader, existing_pair, first_bytes
from lightning_megatron.data.formats.legacy import check_legacy_dataset
from lightning_megatron.data.formats.mmap import check_dataset


def check_any_dataset(prefix: str, option: str) -> DatasetHeader:
    """The header of the dataset at ``prefix``, all of whose index has been checked; tokens may be floats.

    Args:
        prefix: Path of both files without suffix.
        option: The setting that ``prefix`` was given for.

    Raises:
        DataError: If the dataset is missing, damaged or foreign.
    """
    idx_path, _ = existing_pair(prefix, option)
    if first_bytes(idx_path, len(LEGACY_MAGIC)) == LEGACY_MAGIC:
        return check_legacy_dataset(prefix, option=option)
    return check_dataset(prefix, option=option, integers_only=False)
