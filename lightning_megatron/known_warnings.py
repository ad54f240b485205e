"""Hide what the libraries below say on every rank of every run, and no user can act upon."""

from __future__ import annotations

import logging
import re
import warnings

_REPEATED_BY_EVERY_RANK = (
    # (message, module, why nobody needs to read it); both are regular expressions, matched from their beginning.
    (
        "",
        # What its checks of the config say is about transformer_config_overrides, and stays.
        r"megatron\.(?!core\.(transformer\.transformer_config|model_parallel_config)$)",
        "what the engine falls back to; the start-up line names what is used instead",
    ),
    (r"`torch\.distributed\.\w+` is deprecated", "", "names that Megatron uses and torch 2.13 would rename"),
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", "", "the same between Lightning and torch"),
    ("Please use DTensor instead", "", "ShardedTensor, in which Megatron's checkpoints are written"),
    (r"It is recommended to use `self\.log\(", "", "sync_dist: our losses are the same on every rank already"),
    (r"Total length of `list` across ranks is zero", "", "a data module without this split, as its options say"),
    (r"predict returned None if it was on purpose", "", "ranks but one, and texts that were written at once"),
)
_RECORDS = {
    "lightning.pytorch.utilities.rank_zero": re.compile(
        "💡 Tip: For seamless cloud|The following callbacks returned in .* Trainer: (Rich)?ModelSummary$"
    ),
    "megatron.core.tensor_parallel.random": re.compile("CPU RNG state changed within GPU RNG context"),
}
"""Of lightning 2.6.6 at each start: it recommends litlogger and litmodels (two), and tells that its summary of a rank's
share is replaced by ours, of the whole model. Of Megatron on a CPU: there both states are those of one generator."""


def hide_known_warnings() -> None:
    """Drop them from now on. Filters of the user's own, and ``python -W``, keep precedence."""
    for message, module, _ in _REPEATED_BY_EVERY_RANK:
        warnings.filterwarnings("ignore", message=message, module=module, append=True)
    for name in _RECORDS:
        logging.getLogger(name).addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return _RECORDS[record.name].match(str(record.msg)) is None
