"""Write the tables of docs/performance.md that compare engines, from the results in benchmarks/results.

Usage: python tools/peers_table.py [--write]. Without --write it prints the tables; a test holds the page to them.
Where two results measured the same cell of the same model with the same weights on the same machine, the newer one
counts. Every machine has tables of its own, under the name of its folder but for the one that the page is about.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = "amd-epyc-2c"  # the folder of the machine that the page's figures are of where nothing else is said
BEGIN, END = "<!-- peers: python tools/peers_table.py --write -->\n", "<!-- end of peers -->\n"
FORMATS = {
    "bf16": "bf16",
    "int8": "int8 (W8A16)",
    "int8-inputs8": "W8A8",
    "int8-8bit-inputs": "W8A8",
    "int4": "int4 (W4A16)",
    "int4-inputs8": "W4A8",
    "int4-8bit-inputs": "W4A8",
}
CELLS = {
    "decode_b1": "decode, batch 1",
    "decode_8k": "decode, batch 1, 8,192 tokens of context",
    "decode_b4": "decode, batch 4",
    "decode_b16": "decode, batch 16",
    "prefill_512": "prefill, 512 tokens",
    "serve_16": "serving 16 requests, 256 in, 64 out",
    "prefix_1024": "16 requests, shared prefix of 1,024",
    "start": "process start to first token",
}


class Comparison(NamedTuple):
    """One cell of one format beside the fastest engine with equally many bits a weight."""

    created_utc: str
    path: Path
    values: dict[str, object]


Found = dict[tuple[str, str], Comparison]


def newest() -> dict[tuple[str, str], Found]:
    """Return the newest comparison for each (weights, cell) of each (machine, model), the page's own machine first."""
    found: dict[tuple[str, str], Found] = {}
    paths = sorted(RESULTS.rglob("*-peers-*.json"), key=lambda path: (path.parent.name != MACHINE, path))
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        cells = found.setdefault((path.parent.name, result["model"]), {})
        for values in result["comparisons"]:
            label = values["own"].removeprefix("ridgeline ")
            key = (FORMATS.get(label, label), values["cell"])
            if values["best_peer"] and (key not in cells or cells[key].created_utc < result["created_utc"]):
                cells[key] = Comparison(result["created_utc"], path, values)
    return found


def tables() -> str:
    """Return one Markdown table for each model of each machine."""
    found = newest()
    order = sorted(found, key=lambda of: (of[0] != MACHINE, of[0], of[1] != "qwen3-0.6b", of[1]))
    titles = {of: of[1] if of[0] == MACHINE else f"{of[1]} on `{of[0]}`" for of in order}
    return "\n".join(f"### {titles[of]}\n\n{_table(found[of])}" for of in order)


def _table(found: Found) -> str:
    rows = ["| workload | weights | Ridgeline | best peer | ratio | result |", "|---|---|---|---|---|---|"]
    for cell, label in CELLS.items():
        for weights in dict.fromkeys((*FORMATS.values(), *(weights for weights, _ in found))):
            if (comparison := found.get((weights, cell))) is not None:
                rows.append(f"| {label} | {weights} | {_figures(cell, comparison)} |")
    return "\n".join(rows) + "\n"


def _figures(cell: str, comparison: Comparison) -> str:
    values = comparison.values
    ratios = values["ratios"]
    spread = f" ({values['min_ratio']:.2f} to {values['max_ratio']:.2f})" if len(ratios) > 1 else ""
    link = Path("..") / comparison.path.relative_to(ROOT)
    own, peer = (_quantity(values[name], cell) for name in ("own_median", "peer_median"))
    name = f"[{comparison.created_utc[:10]}]({link.as_posix()})"
    return f"{own} | {peer}, {values['peer']} | {values['median_ratio']:.2f}{spread} | {name}, n={len(ratios)}"


def _quantity(value: float, cell: str) -> str:
    return f"{value:.2f} s" if cell == "start" else f"{value:,.1f} tok/s" if value < 100 else f"{value:,.0f} tok/s"


def updated(text: str) -> str:
    """Return `text` with the tables between its marks replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + tables() + END + after


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables(), end="")


if __name__ == "__main__":
    main()
