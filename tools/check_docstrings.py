"""Check that docstrings say something: those of functions start with a verb, such as "Return the ...", and the first
sentence of a class's or a module's has one, such as "Holds the ...". None starts with "Of" or "What".

Usage: python tools/check_docstrings.py [ROOT]. Exit status 1 lists the others. A verb is a word of VERBS, plain or with
an s: no rule of English tells "Rows" from "Runs", so a new verb is added to the list. A property may be described by a
noun, and so is a model by its name in CATALOGUES, whose docstrings are rows of docs/models.md.
"""

import ast
import re
import sys
from pathlib import Path

import check_main

FOLDERS = ("src", "tools")
CATALOGUES = ("src/ridgeline/spec/families",)
FRAGMENTS = ("Of", "What")  # no sentence starts with them
PROPERTIES = ("property", "cached_property")
VERB_LIST = """
abort accept add admit advance allocate answer append apply ask assert assign await bench bind bound build cache call
cancel cast check choose clear close collect combine commit compare compile complete compute concatenate consume
continue convert copy count create cut decide declare decode decrement define describe detach discard divide do draw
drop embed emit encode end enqueue enter estimate evaluate examine exclude execute exit expand export extend fetch fill
find finish fit flatten follow forget fork format free gather generate get give group hand handle hash hold implement
increment initialize insert inspect instantiate interpolate interpret iterate join judge keep know label launch lay let
list load log look lower make manage map mark mask match measure merge mirror move multiply name normalize note observe
offer open order own pack pad parse pass pause pick plan post precede predict preempt prepare preserve price print
process profile publish pull push put quantize queue raise read receive recompute record reduce refuse register reject
release remove rename render repeat replace report represent reserve reset resolve restore return reuse rewrite roll
rotate round run sample save say scale scan schedule search select send serve set share shift show skip sleep slice sort
spell split stand start state stop store stream submit subtract sum take talk tell tokenize train transform translate
transpose trim truncate try turn undo unpack update use validate verify view visit wait wake walk warm warn weigh widen
wrap write yield
"""
VERBS = frozenset(VERB_LIST.split())
IRREGULAR = {"finishes": "finish", "does": "do", "matches": "match", "passes": "pass", "pushes": "push", "mixes": "mix"}
AUXILIARIES = frozenset(("are", "can", "had", "has", "have", "is", "may", "must", "was", "were"))


def is_verb(word: str) -> bool:
    """Tell whether `word` is on the list, plain or in the third person."""
    word = IRREGULAR.get(word.lower(), word.lower())
    forms = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    return any(form in VERBS for form in forms)


def has_verb(sentence: str) -> bool:
    """Tell whether a word of `sentence` is one."""
    return any(word.lower() in AUXILIARIES or is_verb(word) for word in re.findall(r"[A-Za-z]+", sentence))


def is_property(node: ast.AST) -> bool:
    """Tell whether `node` is a function that reads like a value."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator).rpartition(".")[2] in PROPERTIES for decorator in decorators)


def is_complete(node: ast.AST, text: str) -> bool:
    """Tell whether the docstring `text` of `node` has its verb."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return has_verb(re.split(r"\.\s|\n\n", text)[0])
    return is_property(node) or is_verb(text.split()[0].strip("`.,:;()"))


def complaints(root: Path) -> list[str]:
    """Return one line for each docstring that does not start as it should."""
    found: list[str] = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        in_catalogue = any(path.is_relative_to(root / folder) for folder in CATALOGUES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (text := ast.get_docstring(node)) is None:
                continue
            line, first = getattr(node, "lineno", 1), text.split()[0].strip("`.,:;()")
            if first in FRAGMENTS or not (is_complete(node, text) or (in_catalogue and isinstance(node, ast.Module))):
                found.append(f"{path.relative_to(root)}:{line}: no verb or a fragment: {text.splitlines()[0]}")
    return found


if __name__ == "__main__":
    sys.exit(check_main.run(complaints))
