"""Draws a speed-up that was dissected: a bar for each technique, from where those before it ended, logarithmic.

usage: python -m benchmarks.waterfall RESULT.json OUT.svg

RESULT.json is one of `ridgeline bench ablate --out`. Bars are medians of sequential factors, whiskers their range,
circles Shapley values where all subsets were measured.
"""

import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec
from benchmarks.peers.figure import FAINT, INK, LINE, _text

from ridgeline.bench.ablate import AblateReport

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 900, 370, 190
BAR_HEIGHT, STEP, TOP = 16, 30, 78
GAIN, LOSS, WHOLE = "#1f5fa8", "#c0504d", "#666666"


def draw(report: AblateReport) -> str:
    """The figure as SVG."""
    ends = [1.0]
    for each in report.contributions:
        ends.append(ends[-1] * each.sequential.median)
    low, high = min(1.0, *ends), max(*ends, report.total.max, 1.1)

    def x(factor: float) -> float:
        share = math.log(factor / low) / math.log(high / low)
        return LABEL_WIDTH + share * (WIDTH - LABEL_WIDTH - VALUE_WIDTH)

    parts = [
        _text(12, 22, f"What makes {report.model} {report.total.median:.3g} times as fast", size=15, weight="bold"),
        _text(12, 40, "bar: median factor of output tokens/s behind all above it; whisker: range of runs", fill=FAINT),
        _text(12, 55, "circle: Shapley value, the mean over all orders; logarithmic", fill=FAINT),
    ]
    bottom = TOP + STEP * (len(report.contributions) + 1)
    for tick in (tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high):
        parts.append(f'<line x1="{x(tick):.1f}" y1="{TOP - 8}" x2="{x(tick):.1f}" y2="{bottom}" stroke="{LINE}"/>')
        parts.append(_text(x(tick), bottom + 16, f"{tick:g}×", anchor="middle", fill=FAINT))
    for number, (each, begin) in enumerate(zip(report.contributions, ends)):
        one, y = each.sequential, TOP + STEP * number
        end, middle = begin * one.median, y + BAR_HEIGHT / 2
        left, right = sorted((x(begin), x(end)))
        tip = f"alone missing: {each.marginal:.2f}× less" + ("; outputs are others" if each.is_lossy else "")
        parts.append(_text(LABEL_WIDTH - 10, middle + 4, each.words.split(",")[0], anchor="end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="{BAR_HEIGHT}" '
            f'fill="{GAIN if end >= begin else LOSS}"><title>{escape(tip)}</title></rect>'
        )
        lows = [min(max(begin * factor, low), high) for factor in (one.min, one.max)]
        parts.append(f'<path d="M{x(lows[0]):.1f} {middle}H{x(lows[1]):.1f}" stroke="{INK}" fill="none"/>')
        if each.shapley is not None:
            at = x(min(max(begin * each.shapley, low), high))
            parts.append(f'<circle cx="{at:.1f}" cy="{middle}" r="4" fill="#ffffff" stroke="{INK}"/>')
            right = max(right, at + 4)
        words = f"{one.median:.2f}×" + ("" if each.shapley is None else f" (Shapley {each.shapley:.2f}×)")
        parts.append(_text(max(right, x(lows[1])) + 8, middle + 4, words))
    y = TOP + STEP * len(report.contributions)
    parts.append(_text(LABEL_WIDTH - 10, y + BAR_HEIGHT / 2 + 4, "all of it", anchor="end", weight="bold"))
    total = report.total.median
    width = max(1.0, x(total) - x(1))
    parts.append(f'<rect x="{x(1):.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{WHOLE}"/>')
    parts.append(_text(x(total) + 8, y + BAR_HEIGHT / 2 + 4, f"{report.total.median:.3g}×", weight="bold"))
    height = bottom + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">'
    )
    title = f"<title>{escape(report.model)}: what each technique is worth</title>"
    behind = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join((head, title, behind, *parts, "</svg>\n"))


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2 or not argv[-1].endswith(".svg"):
        raise SystemExit("usage: python -m benchmarks.waterfall RESULT.json OUT.svg")
    report = msgspec.json.decode(Path(argv[0]).read_bytes(), type=AblateReport)
    Path(argv[1]).write_text(draw(report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
