"""Measure the length of every function in C++ sources, by braces: no compiler, no macros expanded.

`function_lines(text)` yields names and lengths, from the first line of a signature (its template line included) to the
closing brace. A lambda counts towards the function around it. Raises ValueError where braces do not balance.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Whatever may hold braces, semicolons or newlines that mean nothing; a digit separator is no character literal.
HIDDEN = re.compile(
    r"""//(?:[^\n\\]|\\.)*|/\*.*?\*/|R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*"|"""
    r"""(?<![0-9a-fA-F])'(?:[^'\\\n]|\\.)+'""",
    re.DOTALL,
)
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?P<word>\w*)(?:[^\n\\]|\\[ \t]*\n|\\)*", re.MULTILINE)
ATTRIBUTE = re.compile(
    r"\b(?:alignas|__attribute__|decltype|noexcept|requires)\s*\((?:[^()]|\([^()]*\))*\)|\[\[.*?\]\]"
)
TYPE = re.compile(r"\b(?:class|struct|union|enum)\b")
NAME = re.compile(r"((?:\w+::)*(?:operator\s*(?:\(\)|[^\s\w(]+)|~?\w+))\s*\(")
INITIALIZERS = re.compile(r"\)\s*:(?!:)")  # of a constructor


@dataclass(frozen=True, slots=True)
class Scope:
    """Says what a brace opened; `name` and `first_line` are a function's."""

    name: str | None = None
    first_line: int = 0
    of_declarations: bool = False  # a namespace or a type: functions may stand in it
    ends_statement: bool = True  # not the braces of a value, after which the statement goes on


def function_lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and number of lines of every function that has a body, in the order of their ends."""
    text = HIDDEN.sub(_blank, text)
    directives = {match.start(): match for match in DIRECTIVE.finditer(text)}
    text = DIRECTIVE.sub(_blank, text)
    scopes, branches = [Scope(of_declarations=True)], list[list[Scope]]()
    header, position = 0, 0
    for position, char in enumerate([*text, ""]):
        if position in directives:
            scopes = _branch(directives[position]["word"], scopes, branches)
        if char == "{":
            scope = _opened(text, header, position, scopes[-1])
            scopes.append(scope)
            header = position + 1 if scope.ends_statement else header
        elif char == "}":
            scope = scopes.pop()
            if not scopes:
                raise ValueError(f"line {text.count(chr(10), 0, position) + 1}: a brace is closed that was not opened")
            if scope.name is not None:
                yield scope.name, text.count("\n", 0, position) + 2 - scope.first_line
            header = position + 1 if scope.ends_statement else header
        elif char == ";" and scopes[-1].ends_statement:
            header = position + 1
    if len(scopes) > 1:
        raise ValueError(f"{len(scopes) - 1} braces are not closed")


def _blank(match: re.Match[str]) -> str:
    """Return as many characters and lines, without content."""
    return re.sub(r"[^\n]", " ", match[0])


def _branch(word: str, scopes: list[Scope], branches: list[list[Scope]]) -> list[Scope]:
    """Return the braces open behind a directive: a branch of an #if begins with those before it; the last's go on."""
    if word in ("if", "ifdef", "ifndef"):
        branches.append(scopes.copy())
    elif word in ("else", "elif") and branches:
        return branches[-1].copy()
    elif word == "endif" and branches:
        branches.pop()
    return scopes


def _opened(text: str, begin: int, end: int, outer: Scope) -> Scope:
    """Return what the brace at `end` opens, by the words before it from `begin` on."""
    if not outer.of_declarations:
        return Scope(ends_statement=outer.ends_statement)
    words = ATTRIBUTE.sub("", text[begin:end]).strip()
    words = _without_template(words)
    if re.match(r"(inline\s+)?namespace\b|extern\b[^(]*$", words):
        return Scope(of_declarations=True)
    named = NAME.search(words)
    if TYPE.match(words) and named is None:
        return Scope(of_declarations=True)
    initialized = INITIALIZERS.search(words) and re.search(r"\w$", words)
    if named is None or words.endswith("=") or "=" in words[: named.start()] or initialized:
        return Scope(ends_statement=False)
    first = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
    return Scope(named[1], text.count("\n", 0, first) + 1)


def _without_template(words: str) -> str:
    """Remove `template <...>` in front, whose arguments may have parentheses and names of types."""
    while match := re.match(r"template\s*<", words):
        angles, parentheses, at = 1, 0, match.end()
        while angles and at < len(words):
            parentheses += {"(": 1, ")": -1}.get(words[at], 0)
            angles += 0 if parentheses else {"<": 1, ">": -1}.get(words[at], 0)
            at += 1
        words = words[at:].lstrip()
    return words
