"""Write the tables of docs/performance.md that have a column for each CPU, from the results in benchmarks/results.

Usage: python tools/performance_tables.py [--write]. Without --write it prints them; a test holds the page to them.
Where two results measured the same on the same CPU, the newer one counts.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from generated import between, print_or_write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKS = "<!-- {}: python tools/performance_tables.py --write -->\n", "<!-- end of {} -->\n"
MACHINES = {  # folders of results, and the columns' names in their order
    "amd-epyc-2c": "AMD EPYC (Zen 4)",
    "amd-epyc-avx-vnni-2c": "AMD EPYC (Zen 5)",
    "amd-epyc-avx2-2c": "AMD EPYC (Zen 3)",
    "intel-xeon-amx-2c": "Intel Xeon (AMX)",
}
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B shape",
    "qwen3-1.7b": "Qwen3-1.7B shape",
    "llama-3.2-1b": "Llama-3.2-1B shape",
    "qwen3-moe-1.5b": "Mixture of experts: 1.5 billion parameters, of which a token uses 0.3",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct, from its Q4_1 file",
    "python-9m": "python-9m",
}
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
STEPS = {
    "prefill of 512 tokens": "prefill, 512 tokens",
    "decode of 16 at 256 tokens": "decode, batch 16",
    "decode of 1 at 256 tokens": "decode, batch 1",
}
ROOF_FORMATS = {"bf16": "bf16", "int8": "W8A8", "int4": "W4A8"}


class Figure(NamedTuple):
    """One figure of one CPU: what it is of (a model, a row and the weights), when it was measured, and its text."""

    model: str
    row: str
    weights: str
    machine: str
    created_utc: str
    text: str


def results(kind: str) -> Iterator[tuple[str, str, dict]]:
    """Yield machine, link and content of every result of a kind."""
    for machine in MACHINES:
        for path in sorted((RESULTS / machine).glob(f"*-{kind}-*.json")):
            yield machine, (Path("..") / path.relative_to(ROOT)).as_posix(), json.loads(path.read_text("utf-8"))


def peers() -> Iterator[Figure]:
    """Yield each workload beside the fastest engine with equally many bits a weight."""
    for machine, link, result in results("peers"):
        for values in result["comparisons"]:
            own = values["own"].removeprefix("ridgeline ")
            if values["best_peer"]:
                ratios = values["ratios"]
                spread = f"{values['min_ratio']:.2f} to {values['max_ratio']:.2f}, " if len(ratios) > 1 else ""
                figure = f"[{_quantity(values['own_median'], values['cell'])}]({link})"
                text = f"{figure}, {values['median_ratio']:.2f} × {values['peer']} ({spread}n={len(ratios)})"
                of = result["model"], CELLS[values["cell"]], FORMATS.get(own, own)
                yield Figure(*of, machine, result["created_utc"], text)


def roof() -> Iterator[Figure]:
    """Yield the share of the roof that whole steps reach, and what they spend outside the ops."""
    for machine, link, result in results("roof"):
        for values in result["rows"]:
            shares = values["share_of_roof"]
            spread = f"{min(shares):.0%} to {max(shares):.0%}, n={len(shares)}".replace("%", " %")
            outside = f"{100 * median(values['outside_ops']):.1f} % outside the ops"
            text = f"[{100 * median(shares):.0f} %]({link}) ({spread}), {outside}"
            of = result["model"], STEPS[values["step"]], ROOF_FORMATS[values["format"]]
            yield Figure(*of, machine, result["created_utc"], text)


def predictions() -> str:
    """Return a Markdown table of how far predicted step times are from measured ones, newest results alone."""
    newest: dict[tuple[str, ...], tuple[str, str, dict]] = {}
    for machine, link, result in results("predict"):
        for cell in result["cells"]:
            of = machine, cell["model"], cell["calibrated_on"], cell["format"]
            if of not in newest or newest[of][0] < result["created_utc"]:
                newest[of] = result["created_utc"], link, cell
    errors = {"all": "error", "decode": "decode", "with_prompts": "with prompts", "typical": "of a step's median run"}
    errors["repeated"] = "of another run"
    head = "model", "weights", "CPU", "steps", "step", *errors.values()
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (machine, model, fitted, scheme), (_, link, cell) in newest.items():
        name = model if fitted == model else f"{model}, fitted on {fitted}"
        known = (cell.get(of) for of in errors)  # a result from before there were several runs has fewer
        figures = (f"{100 * each['median']:.1f}, {100 * each['p90']:.0f} %" if each else "" for each in known)
        first = f"{cell['all']['num_steps']:,}", f"[{cell['median_step_ms']:.2f} ms]({link})"
        lines.append(f"| {' | '.join((name, scheme, MACHINES[machine], *first, *figures))} |")
    return "\n".join(lines) + "\n"


def _quantity(value: float, cell: str) -> str:
    return f"{value:.2f} s" if cell == "start" else f"{value:,.1f} tok/s" if value < 100 else f"{value:,.0f} tok/s"


def tables(found: Iterator[Figure], title: str, first_columns: str, rows: dict[str, str]) -> str:
    """Return a Markdown table for each model: a row for each workload and format, a column for each CPU."""
    newest: dict[tuple[str, str, str, str], Figure] = {}
    for figure in found:
        held = newest.get(figure[:4])
        if held is None or held.created_utc < figure.created_utc:
            newest[figure[:4]] = figure
    parts: list[str] = []
    for model, name in MODELS.items():
        columns = [machine for machine in MACHINES if any((f[0], f[3]) == (model, machine) for f in newest)]
        if columns:
            head = [
                f"| {first_columns} | {' | '.join(MACHINES[c] for c in columns)} |",
                "|---" * (2 + len(columns)) + "|",
            ]
            lines = [
                f"| {row} | {weights} | {' | '.join(texts)} |"
                for row in rows.values()
                for weights in dict.fromkeys((*FORMATS.values(), *(key[2] for key in newest)))
                if any(texts := [getattr(newest.get((model, row, weights, c)), "text", "") for c in columns])
            ]
            parts.append("\n".join([title.format(name), "", *head, *lines]) + "\n")
    return "\n".join(parts)


def sections() -> dict[str, str]:
    """Return what stands between the marks, by their name."""
    return {
        "peers": tables(peers(), "### {}", "workload | weights", CELLS),
        "roof": tables(roof(), "**{}**", "step | weights", STEPS),
        "predict": predictions(),
    }


def updated(text: str) -> str:
    """Return `text` with what stands between its marks replaced."""
    for name, tables_of in sections().items():
        begin, end = (mark.format(name) for mark in MARKS)
        text = between(text, begin, end, tables_of)
    return text


def main() -> None:
    """Print the tables, or write them into the page."""
    print_or_write(__doc__, PAGE, lambda: "\n".join(sections().values()), updated)


if __name__ == "__main__":
    main()
