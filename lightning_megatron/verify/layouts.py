"""Layouts to verify: ``tp2,pp2`` and what it stands for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import MOST_PROCESSES, ConfigError, require_divides
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layout import check_function, check_layout

_AXES = ("tp", "pp", "vpp", "cp", "ep", "dp")
_SIZE = re.compile(rf"({'|'.join(_AXES)})([1-9]\d{{0,5}})")
_EXAMPLES = "give e.g. --layouts 1 tp2 tp2,pp2"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout on this host."""

    name: str
    """As the user spells it."""
    parallel: ParallelConfig
    dp: int = 1
    """Number of replicas."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallel.model_parallel_size * self.dp

    def check(self, model: ModelConfig, seq_length: int, batch_size: int, *, trains: bool) -> None:
        """Check that the model and the batch can be split this way.

        Args:
            model: The model.
            seq_length: Tokens of a row.
            batch_size: Rows of the batch.
            trains: Whether gradients are computed.

        Raises:
            ConfigError: If not.
        """
        try:
            check_layout(model, self.parallel)
            check_function(model, self.parallel, "fit" if trains else "validate")
            self.parallel.check_sequence(seq_length)
            shares = self.dp * self.parallel.num_microbatches
            require_divides("dp x pp", shares, "batch_size", batch_size)
        except ConfigError as error:
            raise ConfigError(f"layouts={self.name}: {error}") from None


def parse_layout(name: str) -> Layout:
    """Layout of a name such as ``1``, ``tp2`` or ``tp2,pp2``; ep takes as many replicas as it needs.

    Raises:
        ConfigError: If it is no layout.
    """
    sizes: dict[str, int] = {}
    for part in [] if name == "1" else name.split(","):
        match = _SIZE.fullmatch(part)
        if match is None or match[1] in sizes:
            raise ConfigError(
                f"layouts={name or repr(name)}: expected 1, or sizes of {', '.join(_AXES)} such as tp2,pp2, got"
                f" {part!r}; {_EXAMPLES}"
            )
        sizes[match[1]] = int(match[2])
    replica = sizes.get("tp", 1) * sizes.get("cp", 1)
    ep = sizes.get("ep", 1)
    dp = sizes.pop("dp", ep // math.gcd(ep, replica))
    options: dict[str, Any] = {
        **sizes,
        "sequence_parallel": sizes.get("tp", 1) > 1,
        "num_microbatches": sizes.get("pp", 1),
    }
    try:
        layout = Layout(name=name, parallel=ParallelConfig(**options), dp=dp)
        if layout.world_size > MOST_PROCESSES:
            raise ConfigError(
                f"expected at most {MOST_PROCESSES} processes, got {layout.world_size}; give smaller sizes"
            )
        layout.parallel.data_parallel_size(layout.world_size)
    except ConfigError as error:
        raise ConfigError(f"layouts={name}: {error}") from None
    return layout
