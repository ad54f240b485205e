"""Layout of the package: who may import whom, and how long files, functions and parameter lists may be."""

from __future__ import annotations

import ast
import functools
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import ROOT

PACKAGE = ROOT / "lightning_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder may import from folders of its own level and below, never from above.
LEVELS = {
    "errors": 0,
    "files": 0,
    "foreign_names": 0,
    "hub": 0,
    "known_warnings": 0,
    "engine": 2,
    "models": 3,
    "data": 3,
    "accounting": 3,
    "checkpoint": 3,
    "steps": 4,
    "convert": 4,
    "generate": 4,
    "": 5,  # strategy.py, module.py and the other files of the root
    "datamodules": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}
# models/config.py is what the pure formulas and the engine's checks are about; it imports nothing but errors.
DESCRIPTIONS = {"lightning_megatron.models.config"}
MAY_IMPORT_LIGHTNING = ("", "datamodules", "cli")
MAY_IMPORT_TRANSFORMERS = ("convert", "data", "generate")

MAX_CODE_LINES = 450  # of a file: neither blank, comment nor docstring
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MANY_PARAMETERS = {
    "MegatronStrategy.__init__",  # the options of a configuration file, one by one, as LightningCLI wants them
    "MegatronModule.__init__",  # likewise
    "IndexedDataModule.__init__",  # likewise
    "InstructionDataModule.__init__",  # likewise
    "DatasetDataModule.__init__",  # likewise
    "TextEvaluationDataModule.__init__",  # likewise
    "SDPAttention.__init__",  # Megatron-Core calls it as it calls its own core attention
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _place(path: Path) -> str:
    """The folder of a file below the package, or the name of a file of the root that has a level of its own."""
    relative = path.relative_to(PACKAGE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return relative.stem if relative.stem in LEVELS else ""


def _place_of_module(module: str) -> str:
    parts = module.split(".")[1:]
    if not parts:
        return "__init__"
    if (PACKAGE / parts[0]).is_dir():
        return parts[0]
    return parts[0] if parts[0] in LEVELS else ""


def _imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether only a type checker sees the import."""
    checked = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in checked
        elif isinstance(node, ast.ImportFrom) and node.module == "lightning_megatron":
            for alias in node.names:  # a module of the root, or a public name, which is above everything
                yield f"lightning_megatron.{alias.name}", id(node) in checked
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in checked


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    yield from visit(tree, "")


def _code_lines(path: Path) -> int:
    """Lines with a token that is neither comment nor docstring."""
    docstrings = {
        line
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    blank = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in {*blank, tokenize.COMMENT}]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_a_file_imports_only_from_its_level_and_below() -> None:
    wrong = [
        f"{_name(path)} imports {module}"
        for path in FILES
        for module, only_for_types in _imports(_tree(path))
        if module.startswith("lightning_megatron") and not only_for_types and module not in DESCRIPTIONS
        if LEVELS[_place_of_module(module)] > LEVELS[_place(path)]
    ]
    assert wrong == []


def test_lightning_and_transformers_are_imported_only_where_they_belong() -> None:
    for path in FILES:
        tops = {module.split(".")[0] for module, only_types in _imports(_tree(path)) if not only_types}
        assert "lightning" not in tops or _place(path) in MAY_IMPORT_LIGHTNING, _name(path)
        assert "transformers" not in tops or _place(path) in MAY_IMPORT_TRANSFORMERS, _name(path)


def test_files_functions_and_parameter_lists_are_short() -> None:
    wrong = [f"{_name(path)} is too long" for path in FILES if _code_lines(path) > MAX_CODE_LINES]
    for name, function in (named for path in FILES for named in _functions(_tree(path))):
        assert function.end_lineno is not None
        if function.end_lineno - function.lineno + 1 > MAX_FUNCTION_LINES:
            wrong.append(f"{name} is too long")
        arguments = function.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        is_method = "." in name and bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
        if count - is_method > MAX_PARAMETERS and name not in MANY_PARAMETERS:
            wrong.append(f"{name} has {count - is_method} parameters")
    assert wrong == []


def test_every_module_says_what_it_is() -> None:
    assert [_name(path) for path in FILES if not ast.get_docstring(_tree(path))] == []


def test_every_exception_to_the_rules_is_still_needed() -> None:
    used = {
        name
        for path in FILES
        for name, function in _functions(_tree(path))
        if len(function.args.args) + len(function.args.kwonlyargs) - 1 > MAX_PARAMETERS
    }
    assert used >= MANY_PARAMETERS
