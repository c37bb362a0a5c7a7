"""The pages in a real browser: how soon each is painted, and whether they alone say why a server is slow.

usage: python -m benchmarks.pages [--model python-9m] [--loads 5] [--seconds 6] [--chromium FILE] [--out DIR]

Needs playwright and Debian's chromium. Each page is loaded in browsers without a past: milliseconds from the request to
the first paint, to the first one with content, and until the page's own heading is there. Then servers are started with
one option that is wrong, six clients ask them for some seconds, and a reader goes from the first page to the cause by
clicks that any reader would make: what was clicked, what was read then, and the seconds from the first page to it.
"""

import argparse
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.attacks import Server
from benchmarks.callers import Manners, call, post
from benchmarks.common import option_parser, save, spread

from ridgeline.bench.report import Report
from ridgeline.bench.workload import random_tokens

PAGES = ("chat", "live", "request", "steps", "doctor", "plan", "learn", "numbers")
CLIENTS, PATIENCE_MS = 6, 90_000
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
PAINTS = """() => Object.fromEntries(performance.getEntriesByType('paint').map(each => [each.name, each.startTime]))"""
SHOWN = "name => document.querySelector(`main.page-${name} :is(h1, .hero)`) && performance.now()"
FAULTS: Mapping[str, tuple[tuple[str, ...], str]] = {  # options that are wrong, and what mends them
    "one slot": (("--max-num-seqs", "1"), "--max-num-seqs"),
    "a cache of two sequences": (("--max-model-len", "512", "--kv-cache-bytes", "1310720"), "--kv-cache-bytes"),
    "no prefix caching": (("--no-prefix-caching",), "--prefix-caching"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    """Milliseconds of each load of a page, from the beginning of its request."""

    page: str
    first_paint_ms: list[float]
    first_content_ms: list[float]
    heading_ms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A way from the first page to a fault: (what was clicked, what was read then)."""

    fault: str
    options: str
    clicks: list[tuple[str, str]]
    seconds: float
    is_found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReport(Report):
    """All pages, and all walks."""

    model: str
    pages: list[Painted]
    walks: list[Walk]


def painted(browser: Any, url: str, name: str, loads: int) -> Painted:
    """Load a page again and again, each time in a browser without a past."""
    found: dict[str, list[float]] = {"first-paint": [], "first-contentful-paint": [], "heading": []}
    for _ in range(loads):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{url}/ui#{name}")
        found["heading"].append(page.wait_for_function(SHOWN, arg=name, polling=5).json_value())
        page.wait_for_function("performance.getEntriesByType('paint').length > 1")
        for entry, at_ms in page.evaluate(PAINTS).items():
            found[entry].append(at_ms)
        context.close()
    paint, content, heading = found.values()
    return Painted(page=name, first_paint_ms=paint, first_content_ms=content, heading_ms=heading)


def asked(port: int, model: str, seconds: float) -> None:
    """Ask for short outputs to prompts that begin alike, from a few clients."""
    shared = random_tokens(7, 0, 400, 400)
    prompts = (shared + random_tokens(5, number, 20, 400) for number in range(CLIENTS))
    bodies = [
        post("/v1/completions", model=model, prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
        for prompt in prompts
    ]
    call(port, seconds, [Manners(body) for body in bodies])


def walk(browser: Any, url: str, fault: str) -> Walk:
    """Go from the first page to the finding, and to what the slowest of the last requests waited for."""
    options, mends = FAULTS[fault]
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    began_s = time.monotonic()
    page.goto(f"{url}/ui")
    page.get_by_role("link", name="Doctor").click()
    page.locator(".areas article, .error:not([hidden])").first.wait_for()
    findings = page.locator(".finding").all()
    read = [" ".join(each.inner_text().split()) for each in findings]
    flags = [each.locator("code").first.inner_text() for each in findings]
    found_s = time.monotonic() - began_s
    page.get_by_role("link", name="Request").click()
    page.locator(".request article h3, .request .error:not([hidden])").first.wait_for()
    newest = " ".join(page.locator(".request article, .request .error:not([hidden])").first.inner_text().split())
    page.close()
    return Walk(
        fault=fault,
        options=" ".join(options),
        clicks=[("Doctor", "; ".join(read) or "nothing"), ("Request", newest[:400])],
        seconds=found_s,
        is_found=any(mends in flag for flag in flags),
    )


def measure(browser: Any, options: argparse.Namespace) -> PagesReport:
    """Serve as it should be and look at the pages, then serve with each fault."""
    threads = str(options.threads)
    server = Server(sys.executable, options.model, "--log-level", "warning", "--num-threads", threads)
    try:
        asked(server.port, options.model, 1.0)
        url = f"http://127.0.0.1:{server.port}"
        painted(browser, url, PAGES[0], 1)  # the browser is warm
        pages = [painted(browser, url, name, options.loads) for name in PAGES]
    finally:
        server.close()
    walks: list[Walk] = []
    for fault, (wrong, _) in FAULTS.items():
        server = Server(sys.executable, options.model, "--log-level", "warning", "--num-threads", threads, *wrong)
        try:
            clients = threading.Thread(target=asked, args=(server.port, options.model, options.seconds))
            clients.start()
            clients.join()
            walks.append(walk(browser, f"http://127.0.0.1:{server.port}", fault))
        finally:
            server.close()
    return PagesReport(name="pages", model=options.model, pages=pages, walks=walks)


def show(report: PagesReport) -> None:
    """Print a line for each page, and the clicks of each walk."""
    for each in report.pages:
        paint, content, heading = (
            spread(times, ".0f") for times in (each.first_paint_ms, each.first_content_ms, each.heading_ms)
        )
        print(f"{each.page:8} first paint {paint} ms, with content {content} ms, its heading {heading} ms")
    slowest = max(statistics.median(each.first_paint_ms) for each in report.pages)
    print(f"slowest first paint at the median: {slowest:.0f} ms")
    for each in report.walks:
        print(f"{each.fault} ({each.options}): {'found' if each.is_found else 'NOT found'} in {each.seconds:.1f} s")
        for clicked, read in each.clicks:
            print(f"  {clicked}: {read}")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6, help="for which a slow server is asked")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser's program")
    options = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=options.chromium, args=list(ARGUMENTS))
        report = measure(browser, options)
        browser.close()
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
