"""Layers of the package, and limits on the length of functions and parameter lists."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import ROOT

PACKAGE = ROOT / "lightning_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))

# Top-level directories and files, lowest layer first. A layer may import only earlier ones.
LAYERS = (
    ("errors", "rank_zero"),
    ("foreign_names", "storage"),
    ("engine",),
    ("models", "data", "precision"),
    ("checkpoint",),
    ("planning",),
    ("steps", "convert", "predictions"),
    ("generate", "datamodules"),
    ("harness",),
    ("run",),
    ("callbacks",),
    ("strategy",),
    ("module",),
    ("registration",),
    ("__init__",),
    ("verify",),
    ("cli",),
    ("__main__",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
MUST_NOT_IMPORT_LIGHTNING = (
    "engine",
    "models",
    "data",
    "checkpoint",
    "steps",
    "convert",
    "planning",
    "generate",
)
MAY_IMPORT_TRANSFORMERS = (
    "convert",
    "data",
    "generate",
    "models",  # RoPE scaling
    "verify",
)

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MANY_PARAMETERS = {
    "MegatronStrategy.__init__",  # options of configuration files; LightningCLI needs each as a parameter
    "MegatronModule.__init__",  # likewise
    "IndexedDataModule.__init__",  # likewise
    "InstructionDataModule.__init__",  # likewise
    "PreferenceDataModule.__init__",  # likewise
    "DatasetDataModule.__init__",  # likewise
    "StreamingTextDataModule.__init__",  # likewise
    "TextEvaluationDataModule.__init__",  # likewise
    "SDPAttention.__init__",  # Megatron-Core prescribes the signature
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in FILES}


def _layer_name(module: str) -> str:
    """Top-level directory or file of the package that contains a module."""
    return (module.split(".") + ["__init__"])[1]


def _imports(path: Path, *, for_types: bool = False) -> Iterator[str]:
    """Modules that a file imports, also inside functions; under ``TYPE_CHECKING`` only with ``for_types``."""
    tree = _tree(path)
    only_for_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_for_types and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


def _functions(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods, the latter as ``CLASS.NAME``."""
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{getattr(parent, 'name', '')}.{child.name}", child


def _first_statement(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """The first statement behind the docstring, or the docstring of a function that has nothing else."""
    has_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
    return function.body[1] if has_docstring else function.body[0]


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _upward_imports(*layers: str, for_types: bool = False) -> list[str]:
    """Imports of files of ``layers`` from layers that are not below their own."""
    return [
        f"{_name(path)} imports {imported}"
        for module, path in MODULES.items()
        if _layer_name(module) in layers
        for imported in _imports(path, for_types=for_types)
        if imported in MODULES and _layer_name(module) != _layer_name(imported)
        if LEVELS[_layer_name(imported)] >= LEVELS[_layer_name(module)]
    ]


def test_imports_follow_the_layers() -> None:
    assert _upward_imports(*LEVELS) == []


def test_engine_models_and_steps_import_only_lower_layers_also_for_types() -> None:
    assert _upward_imports("engine", "models", "steps", for_types=True) == []


def test_imports_have_no_cycles() -> None:
    graph = {
        module: {imported for imported in _imports(path) if imported in MODULES}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_lightning_and_transformers_are_imported_only_where_allowed() -> None:
    for module, path in MODULES.items():
        tops = {imported.split(".")[0] for imported in _imports(path)}
        # Without Lightning lightning_utilities has no rank, and its warnings raise: lightning_megatron.rank_zero.
        own = tops.isdisjoint(("lightning", "lightning_utilities"))
        assert own or _layer_name(module) not in MUST_NOT_IMPORT_LIGHTNING, module
        assert "transformers" not in tops or _layer_name(module) in MAY_IMPORT_TRANSFORMERS, module


def test_functions_and_parameter_lists_are_short() -> None:
    violations = []
    many = set()
    for name, function in (named for path in FILES for named in _functions(_tree(path))):
        # A signature and a docstring are read apart from what the function does.
        start = _first_statement(function).lineno
        if (function.end_lineno or 0) - start + 1 > MAX_FUNCTION_LINES:
            violations.append(f"{name} is too long")
        arguments = [
            *function.args.posonlyargs,
            *function.args.args,
            *function.args.kwonlyargs,
        ]
        is_method = bool(arguments) and arguments[0].arg in ("self", "cls")
        # Triton kernels take every address as a parameter, as structures cannot be passed to a GPU.
        is_kernel = any(
            ast.unparse(decorator) in ("triton.jit", "cute.jit")
            for decorator in function.decorator_list
        )
        if len(arguments) - is_method > MAX_PARAMETERS and not is_kernel:
            many.add(name)
    assert violations == []
    assert many == MANY_PARAMETERS


def test_every_module_has_a_docstring() -> None:
    first = {_name(path): (ast.get_docstring(_tree(path)) or "").split("\n\n")[0] for path in FILES}
    assert [name for name, statement in first.items() if not statement or "?" in statement] == []
