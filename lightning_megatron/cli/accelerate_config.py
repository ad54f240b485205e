"""Import of the YAML or JSON that ``accelerate config`` writes for Megatron-LM."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, NamedTuple

from lightning_megatron.cli.run_settings import Settings, layout, read
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.foreign_names import foreign_names

_UNSAID: Settings = {
    "trainer.devices": "auto",
    "trainer.num_nodes": 1,
    "trainer.precision": "32-true",
    "trainer.strategy.sequence_parallel": False,
    "trainer.strategy.distributed_optimizer": False,
    "trainer.strategy.recompute": None,
}
"""What Accelerate does where its file says nothing, and we would do something else."""


class Imported(NamedTuple):
    """What a file says."""

    settings: Settings
    launch: dict[str, str]
    """For torchrun, by Accelerate's keys."""
    left_out: dict[str, list[str]]
    """Keys that were not taken over, by the reason."""


def from_accelerate(path: Path) -> Imported:
    """Read the file.

    Raises:
        ConfigError: If it cannot be read, a key is unknown or asks for what there is not, or values do not fit.
    """
    given = _fields(path)
    rows = {f"{'megatron_lm_' * (row.used_by == 'plugin')}{row.theirs}": row
            for row in foreign_names() if row.used_by in ("config", "plugin")}  # fmt: skip
    for key in given:
        if key not in rows:
            close = difflib.get_close_matches(key, rows, 1)
            fix = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(f"{path}: {key} is not among the keys of accelerate config; {fix}")
    imported = Imported(dict(_UNSAID), {}, {})
    for key, row in rows.items():
        value = given.get(key)
        if not row.value:
            if key in given:
                reason = "; ".join(filter(None, (row.ours and f"set {row.ours}", row.note)))
                imported.left_out.setdefault(reason, []).append(key)
        elif isinstance(value, (dict, list)):
            raise ConfigError(f"{path}: {key}: expected one value, got a {type(value).__name__}; correct it")
        elif row.value == "launch" and value is not None:
            imported.launch[key] = str(value)
        elif row.value.startswith("="):
            if str(value).strip() != row.value[1:] and (value is not None or key == "distributed_type"):
                raise ConfigError(f"{path}: {key}: expected {row.value[1:]}, got {value}; {row.note}")
        elif value is not None:
            assert row.place is not None
            try:
                imported.settings[row.place] = read(row.value, value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {key}: {error}; {row.note or 'correct it'}") from None
    _share_processes(imported.settings)
    return imported


def _share_processes(settings: Settings) -> None:
    """Those of each machine, from those of all."""
    processes, nodes = settings["trainer.devices"], settings["trainer.num_nodes"]
    if processes != "auto":
        require_divides("num_machines", nodes, "num_processes", processes)
        settings["trainer.devices"] = processes // nodes
    layout(settings)


def _fields(path: Path) -> dict[str, Any]:
    """All keys on one level: the section of Megatron-LM may have lost its indentation."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration of accelerate's: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{path}: expected keys and values, got a {type(fields).__name__}; run accelerate config again"
        )
    section = fields.pop("megatron_lm_config", None) or {}
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: megatron_lm_config: expected keys and values, got a {type(section).__name__}; correct it"
        )
    return {str(key): value for key, value in {**fields, **section}.items()}
