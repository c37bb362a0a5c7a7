"""Headless Chromium on the pages, with all that it complained about. Tests skip where it or playwright is not there."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

PATIENCE_MS = 60_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
SIZES = {"wide": (1440, 900, "light"), "phone": (390, 844, "dark"), "narrow": (320, 640, "light")}


class Window:
    """A page on `url`; `complaints` has console messages, reports of the policy, and requests to elsewhere."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()  # what a complaint may contain
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self._complain(f"error: {error}"))
        page.on("request", lambda request: self._request(request.url))

    def open(self, where: str = "") -> Any:
        self.page.goto(f"{self.url}/ui{where}")
        return self.page

    def is_scrolled_sideways(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth > innerWidth")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._complain(f"{message.type}: {message.text}")

    def _request(self, url: str) -> None:
        if not url.startswith(self.url + "/"):
            self._complain(f"request to {url}")

    def _complain(self, what: str) -> None:
        if not any(words in what for words in self.expected):
            self.complaints.append(what)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="THE PAGES ARE NOT TESTED: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("THE PAGES ARE NOT TESTED: there is no chromium; apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, which looks for what keeps people out: of a package, or AXE_CORE, its axe.min.js."""
    path = os.environ.get("AXE_CORE")
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("WHO CAN USE THE PAGES IS NOT TESTED: pip install axe-playwright-python, or set AXE_CORE")
    return resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def serious(page: Any, axe: str) -> list[str]:
    """What axe finds serious or critical on a page, with the first node of each."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in ("serious", "critical")]


@contextmanager
def window(browser: Any, url: str, size: str = "wide") -> Iterator[Window]:
    """A window in a browser without a past; at its end there must be no complaint."""
    width, height, scheme = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        opened = Window(context.new_page(), url)
        yield opened
        assert opened.complaints == []
    finally:
        context.close()
