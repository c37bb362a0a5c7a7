"""The command line of drivers that write logits, and how they say why they failed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path


def run(main: Callable[[str, int, int, list, str, dict], None]) -> None:
    """Call `main` with MODEL, THREADS, CONTINUED, the windows, OUT and OPTIONS of the command line."""
    given = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
    windows = json.loads(Path(sys.argv[4]).read_text())
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), windows, sys.argv[5], given)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
