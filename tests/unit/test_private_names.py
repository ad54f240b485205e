"""docs/private_names.md lists every private name of another package that this one uses."""

import ast
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import ROOT, run_ranks

PACKAGE = ROOT / "lightning_megatron"
PAGE = ROOT / "docs" / "private_names.md"
FOREIGN = r"(?:torch|lightning|megatron|transformers|safetensors)"

PUBLIC_DESPITE_UNDERSCORE = {"_replace", "_exit", "_current_frames"}
"""Documented by Python: of named tuples, ``os`` and ``sys``."""
NOT_NAMES = {
    "_attention_mask",  # of keys of batches
    "_bias",
    "_blocks",
    "_call_",  # parts of names
    "_call_callbacks_",
    "_dataloader",
    "_dropout",
    "_fingerprint",
    "_flex_",
    "_input_ids",  # of keys of batches
    "_logps",  # of keys of batches
    "_lora",
    "_lr_x",
    "_relative_pos_emb",  # in Megatron-LM's files
    "_remove_final_layer_norm",  # of a Hugging Face config
    "_resumed",  # a label of matplotlib
    "_scale_inv",
    "_scales",
    "_stderr",  # of metrics in lm_eval's results
    "_token",
    "_token_id",
}
"""Strings that look like private names."""
OF_OLDER_ENGINES = {"_checkpointed_forward"}
"""Methods that are overridden, and that Megatron-Core 0.19 does not have any more."""
SET_BY_METACLASSES = {"_abc_impl", "_backward_cls", "_is_protocol"}
"""Attributes that ABCs, autograd functions and protocols get without being asked."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not re.fullmatch("__.*__", name)


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines, with those of its objects' attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and _is_assigned_to_self(node):
            yield node.attr


def _is_assigned_to_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def _private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names that a module imports, reads of other objects, or has in a string, as the page spells them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if not node.module.startswith("lightning_megatron"):
                for alias in node.names:
                    yield from _last_private(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _last_private(alias.name)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"_[a-zA-Z]\w*", node.value) and node.value not in own:
                yield node.value
            elif "\n" not in node.value:
                for name in re.findall(rf"\b{FOREIGN}(?:\.\w+)*\._\w+(?:\.\w+)*", node.value):
                    yield from _last_private(name)


def _last_private(dotted: str) -> Iterator[str]:
    private = [part for part in dotted.split(".") if _is_private(part)]
    yield from private[-1:]


def _overridden() -> dict[str, list[str]]:
    """Private methods of other packages' classes that a class of this package overrides, with its files."""
    import lightning_megatron

    found = defaultdict(set)
    for info in pkgutil.walk_packages(lightning_megatron.__path__, "lightning_megatron."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # Triton's kernels without Triton
            continue
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == info.name:
                bases = [base for base in value.__mro__ if not _is_ours(base)]
                for name in filter(_is_private, vars(value).keys() - SET_BY_METACLASSES):
                    if any(name in vars(base) for base in bases):
                        file = str(module.__file__).partition("lightning_megatron/")[2]
                        found[name].add(file)
    return {name: sorted(files) for name, files in found.items()}


def _is_ours(base: type) -> bool:
    return base.__module__.startswith("lightning_megatron") or base in (object, type)


def _used() -> dict[str, set[str]]:
    """Private names of other packages, and the files of this one that use them."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    used = defaultdict(set)
    for path, tree in trees.items():
        for name in _private_names(tree, own - {"_C"}):
            if name not in PUBLIC_DESPITE_UNDERSCORE | NOT_NAMES:
                used[name].add(str(path.relative_to(PACKAGE)))
    (overridden,) = run_ranks(_overridden, 1)
    for name, files in overridden.items():
        used[name].update(files)
    return used


def _listed(page: Path) -> list[str]:
    """Names in the first column of the page's tables."""
    return re.findall(r"^\| `(\w+)` \|", page.read_text(), flags=re.MULTILINE)


def test_page_lists_every_private_name_of_other_packages() -> None:
    listed = _listed(PAGE)
    used = _used()
    missing = {name: files for name, files in used.items() if name not in listed}
    assert missing == {}, "add them to docs/private_names.md with what they are of, and why"
    gone = OF_OLDER_ENGINES - used.keys()
    assert sorted(listed) == sorted(used.keys() | gone), "remove what is no longer used"


def test_private_names_are_found_in_imports_attributes_and_strings() -> None:
    source = (
        "from torch._inductor import config\n"
        "import torch._dynamo\n"
        "from lightning_megatron.x import _ours\n"
        "trainer._checkpoint_connector\n"
        "Patch('megatron.core.x._helper')\n"
        "getattr(loader, '_sampler')\n"
        "self._own.__class__\n"
    )
    found = sorted(_private_names(ast.parse(source), {"_own"}))
    assert found == ["_checkpoint_connector", "_dynamo", "_helper", "_inductor", "_sampler"]
