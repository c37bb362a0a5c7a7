"""Check that docstrings of functions start with a verb, such as "Return the ...", not "Of ..." or "What ...".

Usage: python tools/check_docstrings.py [ROOT]. Exit status 1 lists the others. A verb is a word of VERBS, plain or with
an s: no rule of English tells "Rows" from "Runs", so a new verb is added to the list. Classes, modules and properties
are things, and may be described by a noun. Verbs are asked for in VERB_FOLDERS; nowhere may "Of" come first.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tools")  # where no docstring starts with "Of"
VERB_FOLDERS = (
    "src/ridgeline/backends",
    "src/ridgeline/bench",
    "src/ridgeline/cache",
    "src/ridgeline/cli",
    "src/ridgeline/compress",
    "src/ridgeline/core",
    "src/ridgeline/cost",
    "src/ridgeline/decoding",
    "src/ridgeline/engine",
    "src/ridgeline/explain",
    "src/ridgeline/program",
    "src/ridgeline/quant",
    "src/ridgeline/server",
    "src/ridgeline/spec",
    "src/ridgeline/text",
    "src/ridgeline/weights",
    "tools",
)
PROPERTIES = ("property", "cached_property")
VERB_LIST = """
abort accept add admit advance allocate answer append apply ask assert assign await bench bind build call cancel cast
check choose clear close collect combine commit compare compile complete compute concatenate consume continue convert
copy count create cut decide declare decode decrement describe detach discard divide do draw drop embed emit encode end
enqueue enter estimate evaluate examine execute exit expand export fetch fill find finish fit flatten follow forget
fork format free gather generate get give group hand handle hash hold implement increment initialize insert inspect
instantiate interpolate interpret iterate join judge keep label launch lay let list load log look lower make map mark
mask match measure merge mirror move multiply name normalize note observe offer open order pack pad parse pass pause
pick plan post precede predict preempt prepare preserve print process profile publish pull push put quantize queue
raise read receive record reduce refuse register reject release remove rename render repeat replace report represent
reserve reset resolve restore return reuse roll rotate round run sample save say scale scan schedule search select send
serve set share shift show skip sleep slice sort split start state stop store stream submit subtract sum take talk tell
tokenize train transform translate transpose trim truncate try turn undo unpack update use validate verify view visit
wait wake walk warm warn weigh widen wrap write yield
"""
VERBS = frozenset(VERB_LIST.split())
IRREGULAR = {"finishes": "finish", "does": "do", "matches": "match", "passes": "pass", "pushes": "push", "mixes": "mix"}


def is_verb(word: str) -> bool:
    """Tell whether `word` is on the list, plain or in the third person."""
    word = IRREGULAR.get(word.lower(), word.lower())
    forms = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    return any(form in VERBS for form in forms)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line, docstring, and whether it needs a verb, of everything in a module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is not None:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            decorators = [
                ast.unparse(decorator).rpartition(".")[2] for decorator in getattr(node, "decorator_list", [])
            ]
            yield getattr(node, "lineno", 1), text, is_function and not any(name in PROPERTIES for name in decorators)


def complaints(root: Path) -> list[str]:
    """Return one line for each docstring that does not start as it should."""
    found: list[str] = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        is_strict = any(path.is_relative_to(root / folder) for folder in VERB_FOLDERS)
        for line, text, needs_verb in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            first = text.split()[0].strip("`.,:;()")
            if first == "Of" or (is_strict and needs_verb and not is_verb(first)):
                found.append(f"{path.relative_to(root)}:{line}: starts with {first!r}: {text.splitlines()[0]}")
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = complaints(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
