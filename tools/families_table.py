"""Write the table of docs/models.md from the registry: what each family is, what it caches, and what is not native.

Usage: python tools/families_table.py [--write]. Without --write it prints the table; a test holds the page to it.
"""

import sys
from importlib import import_module
from pathlib import Path

from generated import between, print_or_write

from ridgeline.backends.select import offers
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import KvState, LatentState, Program, State
from ridgeline.program.passes.fuse import fuse
from ridgeline.spec import families

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the small configs are there
from families import tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: python tools/families_table.py --write -->\n", "<!-- end of families -->\n"
SEEDS = 8  # random small configs of a family to look at: their options differ


def table() -> str:
    """Return the table in Markdown, one row for each family."""
    rows = ["| `model_type` | what it is | cache |", "|---|---|---|"]
    return "\n".join([*rows, *map(_row, families.names())]) + "\n"


def _row(name: str) -> str:
    programs = [program for seed in range(SEEDS) if (program := _program(name, seed)) is not None]
    cached = sorted({_kind(state) for program in programs for state in program.states})
    kinds = offers()[0].kinds  # of the backend that is preferred
    groups = [group for program in programs for group in fuse(program) if group.kind not in kinds]
    fallback = sorted({op.kind for group in groups for op in group.ops if op.kind not in kinds})
    text = (import_module(f"{families.__name__}.{name}").__doc__ or "").strip().replace("\n", " ").removesuffix(".")
    alone = f" ({', '.join(f'`{kind}`' for kind in fallback)} on the reference backend alone)" if fallback else ""
    return f"| `{name}` | {text}{alone} | {', '.join(cached)} |"


def _program(name: str, seed: int) -> Program | None:
    try:
        return lower(families.read_spec(tiny_config(name, seed)))
    except ConfigError:
        return None


def _kind(state: State) -> str:
    match state:
        case KvState():
            return "KV" if state.window is None else "KV of a sliding window"
        case LatentState():
            return "MLA latents"
        case _:
            return "recurrent state"


def updated(text: str) -> str:
    """Return `text` with the table between its marks replaced."""
    return between(text, BEGIN, END, table())


def main() -> None:
    """Print the table, or write it into the page."""
    print_or_write(__doc__, PAGE, table, updated)


if __name__ == "__main__":
    main()
