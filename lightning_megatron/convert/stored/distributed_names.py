"""Which tensor of the model is this entry of a distributed checkpoint? However it was wrapped, cut or named.

Megatron-Core stacks the layers of a model: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, rows, columns]. It may
also write each layer by itself (``decoder.layers.3.mlp...``), and models without fused norms call these otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_WRAPPERS = re.compile(r"^(?:module\.|model\.)+")
_NUMBERED = re.compile(r"^(.*?\blayers)\.(\d+)\.(.+)$")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_UNFUSED = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""What norms are called where they are modules of their own, and in the fused layers that rules name."""
_NO_WEIGHTS = re.compile(r"_extra_state|(^|\.)(rng_state|inv_freq)(\.|$|/)")
"""Entries without a weight: the scales of fp8, random states, and tables that are computed anew."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a name says."""

    name: str
    """As a rule's ``megatron``."""
    layer: int | None
    """Number in the name; None if there is none."""

    @property
    def is_stacked(self) -> bool:
        """Whether the first axis counts layers."""
        return self.layer is None and ".layers." in self.name


def is_weightless(name: str) -> bool:
    """Whether the entry holds nothing that is trained."""
    return _NO_WEIGHTS.search(name) is not None


def is_of_optimizer(name: str) -> bool:
    """Whether the entry is optimizer state, of any kind."""
    return _OPTIMIZER.match(name) is not None


def entry_of(name: str, known: Collection[str] | None = None) -> Entry | None:
    """Read an entry's name.

    Args:
        name: As the table of contents has it.
        known: The names in the rules of the model's family; None if the model is not known yet.

    Returns:
        None if the model has no such tensor.
    """
    name = _WRAPPERS.sub("", name)
    numbered = _NUMBERED.match(name)
    if numbered:
        name = f"{numbered[1]}.{numbered[3]}"
    for unfused, fused in _UNFUSED:
        if known is None or name not in known:
            name = name.replace(unfused, fused)
    if known is not None and name not in known:
        return None
    return Entry(name=name, layer=int(numbered[2]) if numbered else None)
