"""Names of weights and modules in the whole model: a stage's own names count its layers from 0."""

from __future__ import annotations

import re
from typing import Any

_LAYER = re.compile(r"(?<=\blayers\.)\d+")


def global_name(name: str, chunk: Any) -> str:
    """The name with the layer's index in the whole model.

    Args:
        name: Name of a weight or module in ``chunk``.
        chunk: A model chunk, in any wrappers.
    """
    match = _LAYER.search(name)
    if match is None:
        return name
    layer = chunk.get_submodule(name[: match.end()])
    number = getattr(layer, "layer_number", int(match[0]) + 1)
    return f"{name[: match.start()]}{number - 1}{name[match.end() :]}"
