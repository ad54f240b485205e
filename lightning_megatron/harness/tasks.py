"""Tasks of lm_eval, found by name or path and loaded from this disk only."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch.utilities.seed import isolate_rng

from lightning_megatron.errors import ConfigError
from lightning_megatron.harness import HarnessOptions, require_lm_eval
from lightning_megatron.harness.offline import offline
from lightning_megatron.harness.task_files import (
    TaskFile,
    check_addresses,
    is_task_path,
    read_task_file,
)


@dataclass(frozen=True, kw_only=True)
class LoadedTasks:
    """Tasks with their datasets."""

    tasks: dict[str, Any]
    """lm_eval's tasks by name, those of groups included."""
    groups: dict[str, Any]
    """lm_eval's groups by name."""


@dataclass(kw_only=True)
class _Catalog:
    """lm_eval's tasks and the user's, by name."""

    manager: Any
    shipped: Path
    is_trusted: bool
    metrics: Sequence[str]
    checked: set[str] = field(default_factory=set)

    def knows(self, name: str) -> bool:
        return name in self.manager.task_index or is_task_path(name)

    def check(self, name: str) -> None:
        """Check the files of a task, group or tag, and of the tasks in it, before lm_eval imports what they name."""
        if name in self.checked:
            return
        self.checked.add(name)
        entry = self.manager.task_index.get(name)
        if entry is None and is_task_path(name):
            self._check_file(read_task_file(Path(name)))
            return
        if entry is None:
            return
        for each in entry.tags if entry.kind.name == "TAG" else ():
            self.check(each)
        if entry.yaml_path is not None:
            self._check_file(read_task_file(entry.yaml_path))

    def _check_file(self, file: TaskFile) -> None:
        if not self.is_trusted:
            file.check_trusted(self.shipped, self.metrics)
        self._check_config(str(file.path), file.config)

    def _check_config(self, name: str, config: Mapping[str, Any]) -> None:
        for key in ("dataset_path", "dataset_name", "dataset_kwargs"):
            check_addresses(f"{name}: {key}", config.get(key))
        members = config.get("task")
        for member in members if isinstance(members, list) else ():
            if isinstance(member, str):
                self.check(member)
            elif isinstance(member, Mapping):
                self.check(str(member.get("group", member.get("task"))))
                self._check_config(name, member)


def load_tasks(options: HarnessOptions) -> LoadedTasks:
    """Find the tasks and load their datasets from this disk. Random states are as before.

    Raises:
        ConfigError: If lm_eval is missing; if a task is unknown, not on this disk, runs code that is not trusted, or
            needs what a language model has not.
    """
    require_lm_eval()
    with isolate_rng(), offline(), templates_in_sandbox(options):
        catalog = _catalog(options)
        tasks: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for name in _expanded(options.task_names, catalog):
            catalog.check(name)
            loaded = _load(catalog, name)
            twice = sorted(tasks.keys() & loaded["tasks"].keys())
            if twice:
                raise ConfigError(f"task {twice[0]}: expected it once, got it twice; leave one out")
            tasks |= loaded["tasks"]
            groups |= loaded.get("groups", {})
    for name, task in tasks.items():
        _check_kind(name, task)
    return LoadedTasks(tasks=tasks, groups=groups)


def _catalog(options: HarnessOptions) -> _Catalog:
    import lm_eval.tasks
    from lm_eval.api import metrics as _  # noqa: F401 (fills the registry)
    from lm_eval.api.registry import METRIC_REGISTRY

    for folder in options.include_path:
        if not Path(folder).is_dir():
            raise ConfigError(
                f"include_path={folder}: expected a directory of task YAMLs; give one"
            )
    folders = [Path(folder).expanduser().resolve() for folder in options.include_path]
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    own = manager.task_index
    are_own = all(
        is_task_path(name) or (name in own and own[name].kind.name == "TASK")
        for name in options.task_names
    )
    if not are_own or _has_group(options.task_names):
        # The index of lm_eval's own 14,000 tasks takes seconds.
        manager = lm_eval.tasks.TaskManager(include_path=folders)
    return _Catalog(
        manager=manager,
        shipped=Path(lm_eval.tasks.__file__).resolve().parent,
        is_trusted=options.trust_task_code,
        metrics=list(METRIC_REGISTRY),
    )


def _has_group(names: Sequence[str]) -> bool:
    """Whether one of the paths is that of a group, whose members may be lm_eval's."""
    return any("group" in read_task_file(Path(name)).config for name in names if is_task_path(name))


def _expanded(names: Sequence[str], catalog: _Catalog) -> Iterator[str]:
    """The names, with patterns replaced by what they match.

    Raises:
        ConfigError: If a name is unknown.
    """
    for name in names:
        if catalog.knows(name):
            yield name
            continue
        matches: list[str] = catalog.manager.match_tasks([name])
        if not matches:
            similar = difflib.get_close_matches(name, catalog.manager.all_tasks, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "or give the path of a YAML"
            raise ConfigError(
                f"task {name}: expected a task of lm_eval or of include_path, got an unknown name; {hint}"
            )
        yield from matches


def _load(catalog: _Catalog, name: str) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = catalog.manager.load([name])
        return loaded
    except ConfigError:
        raise
    except Exception as error:  # of any type: of lm_eval, datasets, the hub, or a task's own code
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (ConnectionError, FileNotFoundError)):
            raise ConfigError(
                f"task {name}: its dataset is not on this disk ({reason}), and evaluate works offline; load it once "
                "where there is a connection, or give a task that reads local files"
            ) from error
        raise ConfigError(
            f"task {name} cannot be loaded ({type(error).__name__}: {reason}); correct its YAML or its data"
        ) from error


def _check_kind(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"task {name} runs code that the model writes, which evaluate does not; leave it out"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(
            f"task {name} has images or sound, and the model reads text; leave it out"
        )


@contextlib.contextmanager
def templates_in_sandbox(options: HarnessOptions) -> Iterator[None]:
    """Context manager: Jinja templates of tasks cannot reach Python's internals, unless the tasks' code is trusted.

    lm_eval 0.4.12, utils.py:apply_template renders them in ``lm_eval.utils.env``, without a sandbox.
    """
    if options.trust_task_code:
        yield
        return
    import lm_eval.utils
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = lm_eval.utils.env
    sandbox = ImmutableSandboxedEnvironment(
        undefined=plain.undefined,
        keep_trailing_newline=plain.keep_trailing_newline,
    )
    sandbox.filters.update(plain.filters)
    with mock.patch.object(lm_eval.utils, "env", sandbox):
        yield
