"""Reads the public documents: their fenced blocks, code spans, links and headings."""

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "src" / "ridgeline"
DOCUMENTS = (
    *(REPO / "README.md", REPO / "CHANGELOG.md", REPO / "SECURITY.md", REPO / "native" / "README.md"),
    *sorted((REPO / "docs").rglob("*.md")),
)

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason` is set where the document says that the block is not run, and why."""

    document: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{name(self.document)}:{self.line}"


def name(document: Path) -> str:
    return document.relative_to(REPO).as_posix()


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, m.start("text")), m["language"], m["text"], m["reason"])
        for m in _FENCE.finditer(text)
    ]


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def spans(document: Path) -> list[str]:
    return _SPAN.findall(prose(document))


def links(document: Path) -> list[str]:
    return _LINK.findall(_SPAN.sub("code", prose(document)))


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def table(document: Path, heading: str) -> list[list[str]]:
    """Cells of the rows, without the head, of the first table under `heading`."""
    _, found, rest = prose(document).partition(f"\n## {heading}\n")
    assert found, f"{name(document)} has no section {heading!r}"
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
