"""Check that files, functions of Python and C++, and whole folders of them are short. The limits and the exceptions
are in budget.toml, beside this.

Usage: python tools/check_budgets.py [ROOT]. Exit status 1 lists every file or function over its limit, every exception
that names no reason, and every exception that is no longer needed.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import check_main
import cpp_functions

BUDGET = Path("tools") / "budget.toml"
SUFFIXES = (".py", ".h", ".cpp")
SHELL_FOLDER = "scripts"  # files without a suffix


@dataclass(frozen=True, slots=True)
class Measure:
    """Something with a length: a file, or with `function` set one function of it."""

    path: str
    function: str | None
    num_lines: int
    limit: int

    def __str__(self) -> str:
        what = f"{self.path}: {self.function}()" if self.function else self.path
        return f"{what}: {self.num_lines} lines, at most {self.limit} allowed"


def function_lines(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield qualified name and length of every function, signature and docstring included."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                assert node.end_lineno is not None
                yield prefix + node.name, node.end_lineno - node.lineno + 1
                yield from function_lines(node, f"{prefix}{node.name}.")
            case ast.ClassDef():
                yield from function_lines(node, f"{prefix}{node.name}.")
            case _:
                yield from function_lines(node, prefix)


def measures(root: Path, limit: dict[str, object]) -> Iterator[Measure]:
    """Yield everything below the folders of one `[[limit]]`."""
    file_limit, function_limit = limit["file_lines"], limit.get("function_lines")
    for folder in limit["folders"]:
        total = 0
        files = (path for path in (root / folder).rglob("*") if path.is_file())
        for path in sorted(path for path in files if folder == SHELL_FOLDER or path.suffix in SUFFIXES):
            name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            yield Measure(name, None, len(text.splitlines()), file_limit)
            total += len(text.splitlines())
            if function_limit is not None and path.suffix in SUFFIXES:
                is_python = path.suffix == ".py"
                functions = function_lines(ast.parse(text)) if is_python else cpp_functions.function_lines(text)
                for function, num_lines in functions:
                    yield Measure(name, function, num_lines, function_limit)
        if "total_lines" in limit:
            yield Measure(folder, None, total, limit["total_lines"])


def complaints(root: Path) -> list[str]:
    """Return what is wrong, one line each."""
    budget = tomllib.loads((root / BUDGET).read_text(encoding="utf-8"))
    over = [m for limit in budget["limit"] for m in measures(root, limit) if m.num_lines > m.limit]
    exceptions = {(e["path"], e.get("function")): e.get("reason", "") for e in budget.get("exception", [])}
    found = [str(m) for m in over if (m.path, m.function) not in exceptions]
    for (path, function), reason in exceptions.items():
        name = f"{path}: {function}()" if function else path
        if not reason.strip():
            found.append(f"{BUDGET}: the exception for {name} has no reason")
        if not any((m.path, m.function) == (path, function) for m in over):
            found.append(f"{BUDGET}: the exception for {name} is no longer needed; remove it")
    return found


if __name__ == "__main__":
    sys.exit(check_main.run(complaints))
