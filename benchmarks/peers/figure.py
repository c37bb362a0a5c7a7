"""Draws a comparison: how many times as fast Ridgeline is as the best peer with the same bits, cell by cell.

usage: python -m benchmarks.peers.figure RESULT.json [RESULT.json ...] OUT.svg

Bars are the median ratio of the repetitions, whiskers their range. Several results are drawn one below the other. The
SVG is written as text: no library, no fonts to embed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import msgspec
from benchmarks.peers.report import SCHEMA_VERSION, Comparison, PeersReport

WIDTH = 900
LABEL_WIDTH = 260  # left of the bars
VALUE_WIDTH = 230  # right of the longest bar: the ratio, and against whom
BAR_HEIGHT, BAR_STEP, CELL_GAP = 13, 17, 12
TITLE_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 34, 30, 30
COLOURS = {16: "#1f5fa8", 8: "#2e9c8f", 4: "#e08a1e"}  # by bits of a weight; apart in grey too
BITS_NAMES = {16: "16-bit weights", 8: "8-bit weights", 4: "4-bit weights"}
INK, FAINT, LINE = "#1c1c1c", "#666666", "#d8d8d8"


@dataclass(frozen=True, slots=True)
class Scale:
    """From a ratio to a place on the page."""

    largest: float

    def x(self, ratio: float) -> float:
        return LABEL_WIDTH + ratio / self.largest * (WIDTH - LABEL_WIDTH - VALUE_WIDTH)

    def ticks(self) -> list[float]:
        """From 0, at most seven."""
        step = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if self.largest / step <= 6)
        return [number * step for number in range(int(self.largest / step) + 1)]


def read_result(path: Path) -> PeersReport:
    """A result of `python -m benchmarks.peers`. Exits with a message for another file."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=PeersReport)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"cannot read {path} as a comparison: {error}") from None
    if report.schema_version != SCHEMA_VERSION:
        raise SystemExit(f"{path} has schema version {report.schema_version}; this version reads {SCHEMA_VERSION}")
    return report


def draw(reports: Sequence[PeersReport]) -> str:
    """The figure as SVG. Exits with a message when there is nothing to compare."""
    against_best = [[pair for pair in report.comparisons if pair.best_peer] for report in reports]
    if not any(against_best):
        raise SystemExit("nothing to draw: no peer ran with the bits of a Ridgeline system")
    scale = Scale(max(1.2, *(pair.max_ratio for pairs in against_best for pair in pairs)))
    parts: list[str] = []
    y = LEGEND_HEIGHT + _legend(parts, {pair.bits for pairs in against_best for pair in pairs})
    for report, pairs in zip(reports, against_best):
        y = _panel(parts, report, pairs, scale, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">'
    )
    title = "<title>Ridgeline against the best peer with the same bits per weight</title>"
    background = f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>'
    return "\n".join((head, title, background, *parts, "</svg>\n"))


def _legend(parts: list[str], bits_drawn: set[int]) -> float:
    """The headline and what the colours mean; returns the height used."""
    parts.append(_text(12, 22, "Times as fast as the best peer with the same bits", size=15, weight="bold"))
    x = 12.0
    for bits in sorted(bits_drawn, reverse=True):
        parts.append(f'<rect x="{x:.0f}" y="34" width="12" height="12" fill="{COLOURS[bits]}"/>')
        parts.append(_text(x + 17, 44, BITS_NAMES[bits]))
        x += 125
    parts.append(_text(x + 10, 44, "bar: median of paired runs; whisker: their range", fill=FAINT))
    return 28


def _panel(parts: list[str], report: PeersReport, pairs: Sequence[Comparison], scale: Scale, top: float) -> float:
    """One result; returns where it ends."""
    machine = f"{report.name}: {report.machine.cpu_model}, {report.threads} threads"
    parts.append(_text(12, top + 20, report.model, size=13, weight="bold"))
    parts.append(_text(LABEL_WIDTH, top + 20, f"{machine}, {report.created_utc[:10]}", fill=FAINT))
    y = first = top + TITLE_HEIGHT
    bars: list[str] = []
    say_own = len({pair.own for pair in pairs}) > len(
        {pair.bits for pair in pairs}
    )  # the colour alone does not tell them apart
    for cell in report.cells:
        drawn = [pair for pair in pairs if pair.cell == cell.name]
        if not drawn:
            continue
        middle = y + (len(drawn) * BAR_STEP - BAR_STEP + BAR_HEIGHT) / 2
        bars.append(_text(LABEL_WIDTH - 10, middle + 4, cell.label, anchor="end"))
        for pair in drawn:
            _bar(bars, pair, scale, y, say_own)
            y += BAR_STEP
        y += CELL_GAP
    for tick in scale.ticks():
        x = scale.x(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{first - 6:.1f}" x2="{x:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(_text(x, y + 15, f"{tick:g}×", anchor="middle", fill=FAINT))
    one = scale.x(1)
    parts.append(
        f'<line x1="{one:.1f}" y1="{first - 6:.1f}" x2="{one:.1f}" y2="{y:.1f}" stroke="{INK}" stroke-width="1.5" '
        'stroke-dasharray="4 3"/>'
    )
    parts.extend(bars)
    return y + AXIS_HEIGHT


def _bar(parts: list[str], pair: Comparison, scale: Scale, y: float, say_own: bool) -> None:
    """The median as a bar, the range as a whisker, and in words."""
    start, end, middle = scale.x(0), scale.x(pair.median_ratio), y + BAR_HEIGHT / 2
    low, high = scale.x(pair.min_ratio), scale.x(pair.max_ratio)
    words = f"{pair.median_ratio:.2f}× {pair.peer}" + (f" by {pair.own}" if say_own else "")
    tip = f"{pair.own} {pair.own_median:.2f}, {pair.peer} {pair.peer_median:.2f}; {len(pair.ratios)} pairs"
    parts.append(
        f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" height="{BAR_HEIGHT}" '
        f'fill="{COLOURS[pair.bits]}"><title>{escape(tip)}</title></rect>'
    )
    parts.append(
        f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 3:.1f}v6M{high:.1f} {middle - 3:.1f}v6" '
        f'stroke="{INK}" fill="none"/>'
    )
    parts.append(_text(high + 8, middle + 4, words))


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal", fill: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" stroke="#ffffff" stroke-width="3" paint-order="stroke">{escape(text)}</text>'
    )


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2 or not argv[-1].endswith(".svg"):
        raise SystemExit("usage: python -m benchmarks.peers.figure RESULT.json [RESULT.json ...] OUT.svg")
    Path(argv[-1]).write_text(draw([read_result(Path(path)) for path in argv[:-1]]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
