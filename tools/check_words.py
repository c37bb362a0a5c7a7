"""Check that code and documents use the field's words: the private ones and their replacements are in words.toml.

Usage: python tools/check_words.py [ROOT]. Exit status 1 lists every line with a private word, and every exception that
names no reason or is no longer needed.
"""

import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import check_main

WORDS = Path("tools") / "words.toml"
SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".md", ".txt")
NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)  # comments and strings of C++


@dataclass(frozen=True, slots=True)
class Word:
    """A private word, what to say instead, and where it may stay and why. `names`: look at identifiers alone."""

    pattern: re.Pattern[str]
    use: str
    names: bool
    exceptions: dict[str, str]  # file -> reason


def words(root: Path) -> Iterator[Word]:
    """Read the list."""
    for entry in tomllib.loads((root / WORDS).read_text(encoding="utf-8"))["word"]:
        flags = 0 if entry.get("case", False) else re.IGNORECASE
        pattern = re.compile(entry["pattern"], flags)
        yield Word(pattern, entry["use"], entry.get("names", False), entry.get("except", {}))


def files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path below `root` and the text of every file that is checked."""
    scope = tomllib.loads((root / WORDS).read_text(encoding="utf-8"))["scope"]
    for folder in scope["folders"]:
        for path in sorted((root / folder).rglob("*")) if (root / folder).is_dir() else [root / folder]:
            name = path.relative_to(root).as_posix()
            left_out = any(name.startswith(start) for start in scope["left_out"])
            if path.is_file() and not left_out and (path.suffix in SUFFIXES or folder == "scripts"):
                yield name, path.read_text(encoding="utf-8")


def identifiers(name: str, text: str) -> str:
    """Return `text` with nothing left but identifiers, each in its line."""
    if name.endswith((".py", ".pyi")):
        lines = [""] * (text.count("\n") + 2)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                lines[token.start[0] - 1] += " " + token.string
        return "\n".join(lines)
    if name.endswith((".h", ".cpp")):
        return NO_CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return ""


def complaints(root: Path) -> list[str]:
    """Return what is wrong, one line each."""
    found: list[str] = []
    checked = [(name, text, identifiers(name, text)) for name, text in files(root)]
    for word in words(root):
        needed: set[str] = set()
        for name, text, code in checked:
            for number, line in enumerate((code if word.names else text).splitlines(), 1):
                if (match := word.pattern.search(line)) is None:
                    continue
                needed.add(name)
                if name not in word.exceptions:
                    found.append(f"{name}:{number}: {match[0]!r}: say {word.use}")
        for name, reason in word.exceptions.items():
            if name not in needed:
                found.append(
                    f"{WORDS}: the exception of {word.pattern.pattern!r} for {name} is no longer needed; remove it"
                )
            elif not reason.strip():
                found.append(f"{WORDS}: the exception of {word.pattern.pattern!r} for {name} has no reason")
    return found


if __name__ == "__main__":
    sys.exit(check_main.run(complaints))
