"""Write what quantization costs in quality into docs/performance.md, and its figure, from benchmarks/results.

Usage: python tools/quality_tables.py [--write]. Without --write it prints the tables; a test holds page and figure to
them. Several results of `benchmarks/perplexity.py`: those on most tokens count, and for a format the newest.
"""

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from generated import between, print_or_write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
FIGURE = ROOT / "docs" / "figures" / "quality.svg"
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-avx-vnni-2c"
BEGIN, END = "<!-- quality: python tools/quality_tables.py --write -->\n", "<!-- end of quality -->\n"
MODELS = {"python-9m": "python-9m", "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M-Instruct"}
INT4 = "int4"
# Which format of `benchmarks.decode_stream` steps of a row take as long as; inputs of 16 bits at batch 1 too.
SPEEDS = {
    **dict.fromkeys(("rtn", "gptq", "awq", "int4 g128"), INT4),
    **dict.fromkeys(("int8", "int8 W8A8", "smoothquant", "gptq-8-bits"), "int8 int8-inputs"),
    **{name: name for name in ("llm-int8", "fp8", "nf4", "mxfp4", "nvfp4")},
    "Q4_K_M.gguf": "Q4_K.gguf",
    "Q6_K.gguf": "Q6_K.gguf",
}
WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP = 900, 380, 70, 40, 64
COLOURS = {16: "#1f5fa8", 8: "#e08a1e"}  # by the bits of inputs
INK, FAINT, LINE = "#1c1c1c", "#666666", "#d8d8d8"


class Row(NamedTuple):
    """One format of a model, and where it was measured."""

    name: str
    created_utc: str
    link: str
    values: dict[str, Any]

    @property
    def kl(self) -> float:
        return max(self.values["comparison"]["kl"]["mean"], 0.0)

    @property
    def input_bits(self) -> int:
        return 8 if self.values["options"].get("quantize_inputs") == "int8" else 16


def rows(model: str) -> list[Row]:
    """Return the formats of a model, the most exact first."""
    found: dict[str, Row] = {}
    paths = sorted(RESULTS.glob(f"*-perplexity-{model}*.json"))
    results = {path: json.loads(path.read_text("utf-8")) for path in paths}
    most = max((tokens_of(result) for result in results.values()), default=0)
    for path, result in results.items():
        if tokens_of(result) < most:
            continue
        link = f"[{result['created_utc'][:10]}]({(Path('..') / path.relative_to(ROOT)).as_posix()})"
        for values in result["formats"]:
            row = Row(values["name"], result["created_utc"], link, values)
            if row.name not in found or found[row.name].created_utc < row.created_utc:
                found[row.name] = row
    return sorted((row for row in found.values() if row.name != "float32"), key=lambda row: row.kl)


def tokens_of(result: dict[str, Any]) -> int:
    return result["formats"][0]["comparison"]["num_tokens"]


def speeds() -> dict[str, float]:
    """Return how many times as fast as bfloat16 a decoding step is at the same memory bandwidth, by format."""
    found: dict[str, float] = {}
    for path in sorted(RESULTS.glob("*-decode-stream-formats*.json")):
        runs = [run for run in json.loads(path.read_text("utf-8"))["runs"] if run["context"] == 64]
        time = {run["format"]: run["bytes_per_step"] / median(run["share_of_stream"]) for run in runs}
        found |= {name.removeprefix("qwen3-0.6b-"): time["bf16"] / own for name, own in time.items()}
    return found


def table(model: str) -> str:
    """Return the Markdown table of a model."""
    head = "format", "bits", "decode", "KL, bits per token", "perplexity", "bits per byte, above float32", "same top-1"
    lines = [f"| {' | '.join(head)} | result |", "|---" * (len(head) + 1) + "|"]
    fast = speeds()
    for row in rows(model):
        figures = row.values["comparison"]
        above, top1 = figures["bits_per_byte_above_base"], figures["top1_agreement"]
        matrices = row.name.replace(" inputs 8", "").removesuffix(", plain embeddings")
        speed = fast.get(SPEEDS.get(matrices, ""))
        cells = (
            row.name.replace(" inputs 8", ", inputs of 8 bits"),
            f"{row.values['bits']:.2f}",
            f"{speed:.1f} ×" if speed else "",
            f"{row.kl:.5f} ± {figures['kl']['standard_error']:.5f}",
            f"{figures['perplexity']:.3f}",
            f"{above['mean']:+.4f} ± {above['standard_error']:.4f}",
            f"{100 * top1['mean']:.1f} ± {100 * top1['standard_error']:.1f} %",
        )
        lines.append(f"| {' | '.join((*cells, row.link))} |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    """Return all tables, each behind its heading."""
    parts: list[str] = []
    for model, name in MODELS.items():
        if found := rows(model):
            figures = found[0].values["comparison"]
            size = f"{figures['num_tokens']:,} tokens, perplexity in float32 {figures['base_perplexity']:.3f}"
            parts.append(f"**{name}**, {size}:\n\n{table(model)}")
    return "\n".join(parts)


def frontier(found: Sequence[Row]) -> Iterator[Row]:
    """Yield those of which no other has both fewer bits and a smaller KL, those of fewest bits first."""
    least = math.inf
    for row in sorted(found, key=lambda row: (row.values["bits"], row.kl)):
        if row.kl < least:
            least = row.kl
            yield row


def figure() -> str:
    """Return the figure: bits of a parameter and KL of every format, and the line of the best, a panel a model."""
    parts = [
        text(12, 22, "What quantization costs: KL to float32 against bits of a parameter", size=15, weight=700),
        text(12, 44, "inputs of 16 bits, or floats", fill=COLOURS[16]),
        text(190, 44, "inputs of 8 bits", fill=COLOURS[8]),
        text(310, 44, "line: no format has both fewer bits and a smaller KL; logarithmic", fill=FAINT),
    ]
    top = float(TOP)
    for model, name in MODELS.items():
        if found := [row for row in rows(model) if row.kl > 0 and row.values["bits"] < 17]:
            panel(parts, name, found, top)
            top += PANEL_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" '
        f'height="{top:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">'
    )
    title = "<title>KL and bits of a parameter of every format and method</title>"
    background = f'<rect width="{WIDTH}" height="{top:.0f}" fill="#ffffff"/>'
    return "\n".join((head, title, background, *parts, "</svg>\n"))


def panel(parts: list[str], name: str, found: Sequence[Row], top: float) -> None:
    """Draw one model."""
    low = math.floor(math.log10(min(row.kl for row in found)))
    high = math.ceil(math.log10(max(row.kl for row in found)))
    height, first = PANEL_HEIGHT - 90, min(row.values["bits"] for row in found) - 0.5

    def place(bits: float, kl: float) -> tuple[float, float]:
        share = (math.log10(kl) - low) / (high - low)
        return LEFT + (bits - first) / (17 - first) * (WIDTH - LEFT - RIGHT), top + 34 + (1 - share) * height

    parts.append(text(12, top + 16, name, size=13, weight=700))
    for power in range(low, high + 1):
        _, y = place(first, 10**power)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end", fill=FAINT))
    for bits in range(math.ceil(first), 17, 2):
        parts.append(text(place(bits, 10**low)[0], top + height + 54, f"{bits} bits", anchor="middle", fill=FAINT))
    best = list(frontier(found))
    line = " L".join("{:.1f} {:.1f}".format(*place(row.values["bits"], row.kl)) for row in best)
    parts.append(f'<path d="M{line}" stroke="{INK}" stroke-dasharray="4 3" fill="none"/>')
    for row in found:
        x, y = place(row.values["bits"], row.kl)
        tip = f"{row.name}: {row.values['bits']:.2f} bits, KL {row.kl:.5f}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[row.input_bits]}">'
            f"<title>{escape(tip)}</title></circle>"
        )
    parts += [text(place(row.values["bits"], row.kl)[0] + 7, place(1, row.kl)[1] - 5, row.name) for row in best]


def text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, weight: int = 400, fill: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" stroke="#ffffff" stroke-width="3" paint-order="stroke">{escape(words)}</text>'
    )


def updated(page: str) -> str:
    """Return `page` with the tables between its marks replaced."""
    return between(page, BEGIN, END, tables())


def main() -> None:
    """Print the tables, or write them into the page, and the figure."""
    if print_or_write(__doc__, PAGE, tables, updated):
        FIGURE.write_text(figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
