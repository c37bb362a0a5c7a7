"""Write the tables of docs/performance.md about drafts, from the results in benchmarks/results.

Usage: python tools/speculation_tables.py [--write]. Without --write it prints them; a test holds the page to them.
Where several results measured the same of the same model on the same machine, the newest one counts. Every result has
its place, wins and losses alike.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from generated import between, print_or_write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speculation: python tools/speculation_tables.py --write -->\n", "<!-- end of speculation -->\n"

Cell = dict[str, Any]
Key = tuple[object, ...]


def newest(pattern: str, key: Callable[[Cell], Key]) -> Iterator[tuple[Cell, str, str, str]]:
    """Yield the newest cell of every machine, model and `key`, with these two and a link to its result."""
    found: dict[Key, tuple[str, Cell, str, str, str]] = {}
    for path in sorted(RESULTS.rglob(pattern)):
        result = json.loads(path.read_text(encoding="utf-8"))
        link = f"[{result['created_utc'][:10]}]({(Path('..') / path.relative_to(ROOT)).as_posix()})"
        for cell in ({**cell, "cold": result.get("cold", False)} for cell in result["cells"]):
            place = (path.parent.name, result["model"], json.dumps(result.get("options", {})), *key(cell))
            if place not in found or found[place][0] < result["created_utc"]:
                found[place] = result["created_utc"], cell, path.parent.name, result["model"], link
    for _, (_, *rest) in sorted(found.items(), key=lambda each: str(each[0])):
        yield rest[0], rest[1], rest[2], rest[3]


def speeds() -> str:
    """Return the table of speed-ups: drafts over none, in pairs."""
    rows = [
        "| machine | model | domain | prompts | batch | T | drafts | with over without | outside | in loops | result |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|---|---|---|")
    by = ("domain", "cold", "batch", "temperature", "speculate")
    found = newest("*-speculation-*.json", lambda c: _measured(c, *by))
    for cell, machine, model, link in found:
        if "speedup" in cell:
            outside = _figure(cell["speedup_outside_loops"]) if cell["speedup_outside_loops"] else "none"
            prompts = "computed" if cell["cold"] else "cached"
            place = f"`{machine}` | {model} | {cell['domain']} | {prompts} | {cell['batch']} | {cell['temperature']:g}"
            in_loops = f"{100 * cell['share_in_loops']:.0f} %"
            what = f"`{cell['speculate']}` | {_figure(cell['speedup'])} | {outside} | {in_loops}"
            rows.append(f"| {place} | {what} | {link} |")
    return "\n".join(rows) + "\n"


def acceptance() -> str:
    """Return the table of acceptance by position."""
    rows = ["| model | drafts | domain | T | text | drafts made | 1st | 2nd | 3rd | 4th | result |"]
    rows.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for cell, _, model, link in newest(
        "*-acceptance-*.json", lambda c: _measured(c, "speculate", "domain", "temperature", "in_loops")
    ):
        places = zip(cell["acceptance"][:4], cell["num_drafted"][:4], strict=True)
        shares = [f"{share:.2f}" if made >= 20 else "" for share, made in places]
        text = "in loops" if cell["in_loops"] else "outside"
        what = f"{model} | `{cell['speculate']}` | {cell['domain']} | {cell['temperature']:g} | {text}"
        rows.append(f"| {what} | {cell['num_drafted'][0]:,} | {' | '.join(shares)} | {link} |")
    return "\n".join(rows) + "\n"


def rounds() -> str:
    """Return the table of drafts with a chosen acceptance: what formulas say of a round, and what was measured."""
    rows = ["| model | weights | batch | k | α | tokens, exact | kα + 1 | predicted | measured | result |"]
    rows.append("|---|---|---|---|---|---|---|---|---|---|")
    for cell, _, model, link in newest(
        "*-speculation-oracle-*.json", lambda c: _measured(c, "format", "batch", "length", "acceptance")
    ):
        share, length = cell["accepted_share"], cell["length"]
        exact = sum(share**place for place in range(length + 1))
        speed = f"{cell['predicted']:.2f} | {median(cell['measured']):.2f}"
        place = f"{model} | {cell['format']} | {cell['batch']} | {length} | {share:.2f}"
        rows.append(f"| {place} | {exact:.2f} | {length * share + 1:.2f} | {speed} | {link} |")
    return "\n".join(rows) + "\n"


def peers() -> str:
    """Return the table of drafts here and in other engines, each over its own decoding without."""
    rows = ["| machine | model | beside | drafts | domain | system | gain, range | tokens/s without | with | result |"]
    rows.append("|---|---|---|---|---|---|---|---|---|---|")
    by = ("beside", "drafts", "domain", "system")
    for cell, machine, model, link in newest("*-speculation-beside-*.json", lambda c: _measured(c, *by)):
        spread = f"{cell['gain']:.2f} ({min(cell['ratios']):.2f} to {max(cell['ratios']):.2f})"
        rates = f"{cell['off_tokens_per_s']:.0f} | {cell['on_tokens_per_s']:.0f}"
        place = f"{cell.get('beside', 'llama.cpp')} | {cell.get('drafts', 'lookup')} | {cell['domain']}"
        rows.append(f"| `{machine}` | {model} | {place} | {cell['system']} | {spread} | {rates} | {link} |")
    return "\n".join(rows) + "\n"


def _measured(cell: Cell, *names: str) -> Key:
    return tuple(cell.get(name) for name in names)


def _figure(figure: Cell) -> str:
    low, high = figure["interval"] or (figure["low"], figure["high"])
    return f"{figure['median']:.2f} ({low:.2f} to {high:.2f})"


def tables() -> str:
    """Return all tables, each behind its heading."""
    parts = {
        "### With drafts over without": speeds(),
        "### Drafts beside llama.cpp and vLLM": peers(),
        "### Acceptance by position": acceptance(),
        "### Formula and measurement": rounds(),
    }
    return "\n".join(f"{heading}\n\n{table}" for heading, table in parts.items())


def updated(text: str) -> str:
    """Return `text` with the tables between its marks replaced."""
    return between(text, BEGIN, END, tables())


def main() -> None:
    """Print the tables, or write them into the page."""
    print_or_write(__doc__, PAGE, tables, updated)


if __name__ == "__main__":
    main()
