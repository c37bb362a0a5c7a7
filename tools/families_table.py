"""The README's table of model families, made from the registry: what each is, what it keeps, and what is not native.

Usage: python tools/families_table.py [--write]. Without --write it prints the table; a test holds the README to it.
"""

import argparse
import random
from importlib import import_module
from pathlib import Path

from ridgeline.backends.kinds import NATIVE_KINDS
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import KvState, LatentState, Program, State
from ridgeline.program.passes.fuse import fuse
from ridgeline.spec import families

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- families: python tools/families_table.py --write -->\n", "<!-- end of families -->\n"
SEEDS = 8  # small configs of a family that are looked at: its options vary from one to the next


def table() -> str:
    """The table in Markdown, one row for each family."""
    rows = ["| `model_type` | what it is | keeps |", "|---|---|---|"]
    return "\n".join([*rows, *map(_row, families.names())]) + "\n"


def _row(name: str) -> str:
    programs = [program for seed in range(SEEDS) if (program := _program(name, seed)) is not None]
    kept = sorted({_kind(state) for program in programs for state in program.states})
    groups = [group for program in programs for group in fuse(program) if group.kind not in NATIVE_KINDS]
    fallback = sorted({op.kind for group in groups for op in group.ops if op.kind not in NATIVE_KINDS})
    text = (import_module(f"{families.__name__}.{name}").__doc__ or "").strip().replace("\n", " ").removesuffix(".")
    alone = f" ({', '.join(f'`{kind}`' for kind in fallback)} on the reference backend alone)" if fallback else ""
    return f"| `{name}` | {text}{alone} | {', '.join(kept)} |"


def _program(name: str, seed: int) -> Program | None:
    rng = random.Random(f"{name} {seed}")
    try:
        return lower(families.read_spec(families.family(name).tiny(lambda *options: rng.choice(options))))
    except ConfigError:
        return None


def _kind(state: State) -> str:
    match state:
        case KvState():
            return "keys and values" if state.window is None else "keys and values of a window"
        case LatentState():
            return "latents"
        case _:
            return "a recurrent state"


def updated(text: str) -> str:
    """`text` with the table between its marks replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    """Prints or writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
