"""Run a check from the command line: the main of every tools/check_*.py."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run(complaints: Callable[[Path], Sequence[str]]) -> int:
    """Print what `complaints` finds below the first argument, or in this checkout; return the exit status, 1 if any."""
    found = complaints(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
    for line in found:
        print(line)
    return 1 if found else 0
