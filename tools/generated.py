"""Replace what stands between two marks of a page, or print it: what every tool that writes tables shares."""

import argparse
from collections.abc import Callable
from pathlib import Path


def between(text: str, begin: str, end: str, tables: str) -> str:
    """Return `text` with what stands between its marks replaced."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return before + begin + tables + end + after


def print_or_write(doc: str | None, page: Path, tables: Callable[[], str], updated: Callable[[str], str]) -> bool:
    """Read the options of a tool: print its tables, or with --write put them into the page; tell which."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {page.name}")
    writes: bool = parser.parse_args().write
    if writes:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables(), end="")
    return writes
