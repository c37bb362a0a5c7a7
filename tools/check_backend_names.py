"""Reports code outside a backend's folder that decides by the backend's name. Called by scripts/check.

What a backend can do it says itself, through `backends/base.py`; a comparison with its name somewhere else is a rule
that the next backend would have to find and extend.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import check_main

BACKENDS = Path("src/ridgeline/backends")


def backend_names(folder: Path) -> set[str]:
    """Return the names of the folders that offer a backend."""
    return {path.parent.name for path in folder.glob("*/backend.py")}


def decisions(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name where a value is compared with one of `names`, matched against it, or typed by it."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=comparators):
                values = [constant for side in (left, *comparators) for constant in _constants(side)]
            case ast.MatchValue(value=value):
                values = list(_constants(value))
            case ast.Subscript(value=ast.Name(id="Literal"), slice=members):
                values = list(_constants(members))
            case ast.Subscript(value=ast.Dict() as table):
                values = list(_constants(table))
            case _:
                continue
        yield from ((value.lineno, value.value) for value in values if value.value in names)


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield a constant, or those of a tuple, list or set, or the keys of a table."""
    match node:
        case ast.Constant():
            yield node
        case ast.Tuple(elts=members) | ast.List(elts=members) | ast.Set(elts=members):
            yield from (constant for member in members for constant in _constants(member))
        case ast.Dict(keys=keys):
            yield from (constant for key in keys if key is not None for constant in _constants(key))
        case _:
            return


def complaints(root: Path) -> list[str]:
    """Return a message for each decision by name under `root`, src/ridgeline of a checkout."""
    folder = root / BACKENDS
    names = backend_names(folder)
    messages: list[str] = []
    for path in sorted((root / "src").rglob("*.py")):
        own = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else ""
        for line, name in decisions(ast.parse(path.read_text()), names - {own}):
            messages.append(f"{path.relative_to(root)}:{line}: decides by the name {name!r}; ask the Backend instead")
    return messages


if __name__ == "__main__":
    sys.exit(check_main.run(complaints))
