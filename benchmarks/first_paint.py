"""How soon a page of the server is seen, by the browser's own Performance API: first paint and first content.

usage: python -m benchmarks.first_paint [--model python-1m] [--pages chat,learn,numbers] [--repeats 7]

Each time is of a window without a past, in headless Chromium on this machine, counted from the start of the navigation;
`content_ms` is when the page's heading is there. Needs playwright and a chromium.
"""

import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.common import option_parser, save
from playwright.sync_api import sync_playwright

from ridgeline.bench.report import Report

READ = """() => Object.fromEntries(performance.getEntriesByType("paint").map((each) => [each.name, each.startTime]))"""
SHOWN = """() => document.querySelector("main h1") && performance.now()"""
MILESTONES = ("first-paint", "first-contentful-paint", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaintReport(Report):
    """Medians and the longest of the repeats, by page and milestone, in milliseconds."""

    model: str
    repeats: int
    median_ms: dict[str, dict[str, float]]
    longest_ms: dict[str, dict[str, float]]


def times_ms(browser: Any, url: str) -> dict[str, float]:
    """Open a page in a new window and return when it was painted."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(url)
    content = page.wait_for_function(SHOWN).json_value()
    found = {**page.evaluate(READ), "content": content}
    context.close()
    return {name: round(found[name], 1) for name in MILESTONES}


def measure(model: str, pages: list[str], repeats: int) -> PaintReport:
    """Serve the model, and open each page several times, in turns."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no chromium; apt-get install chromium")
    line = [sys.executable, "-m", "ridgeline", "serve", model, "--port", "0"]
    found: dict[str, list[dict[str, float]]] = {page: [] for page in pages}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        said = ""
        while "/ui" not in said:
            said = server.stdout.readline()
            if server.poll() is not None:
                raise SystemExit("the server did not start")
        url = next(word for word in said.split() if "/ui" in word)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            times_ms(browser, f"{url}#{pages[0]}")  # the browser's own start
            for _ in range(repeats):
                for page in pages:
                    found[page].append(times_ms(browser, f"{url}#{page}"))
            browser.close()
        server.terminate()
    of = {page: {name: [each[name] for each in all_of] for name in MILESTONES} for page, all_of in found.items()}
    return PaintReport(
        name="first-paint",
        model=model,
        repeats=repeats,
        median_ms={page: {name: statistics.median(each) for name, each in of[page].items()} for page in pages},
        longest_ms={page: {name: max(each) for name, each in of[page].items()} for page in pages},
    )


def main() -> None:
    """Measure, show and save."""
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--pages", default="chat,learn,numbers")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    report = measure(options.model, options.pages.split(","), options.repeats)
    for page, times in report.median_ms.items():
        print(page, ", ".join(f"{name} {value:.0f} ms" for name, value in times.items()))
    save(options.out, report)


if __name__ == "__main__":
    main()
