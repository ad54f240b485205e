"""Hide what the libraries below say on every rank of every run, and no user can act upon."""

from __future__ import annotations

import logging
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
)
_ADVERTISEMENT = "💡 Tip: For seamless cloud"
"""How lightning 2.6.6 begins the two records in which it recommends litlogger and litmodels, at each start."""


def hide_known_warnings() -> None:
    """Drop them from now on. Filters of the user's own, and ``python -W``, keep precedence."""
    for message, module, _ in _REPEATED_BY_EVERY_RANK:
        warnings.filterwarnings("ignore", message=message, module=module, append=True)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_ADVERTISEMENT)
