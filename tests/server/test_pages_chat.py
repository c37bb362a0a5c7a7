"""Chat in a browser: streams, stops, edits, probabilities, keys, errors, and texts that would like to be more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, eventually, gated_serving, new_engine, serving

from browser import SIZES, chromium, window

__all__ = ["chromium"]

HOSTILE = """<img src=x onerror="document.title='taken'"> <script>document.title='taken'</script>
[click](javascript:alert(1)) [text](data:text/html,x) ![](http://elsewhere.example/x.png) <svg onload=alert(1)>
```html
<iframe src="//elsewhere.example"></iframe>
```
| a | b |
|---|---|
| <b>1</b> | **two** |
- `code` \u202e and *more* & <a href="http://elsewhere.example">out</a>
"""


@pytest.fixture(scope="module")
def plain(bundled: Path) -> Iterator[LiveServer]:
    with serving(new_engine(bundled)) as server:
        yield server


@pytest.fixture(scope="module")
def bundled() -> Path:
    from ridgeline.weights.folder import BUNDLED_MODELS

    return BUNDLED_MODELS / "python-1m"


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answered(page: Any, count: int = 1) -> Any:
    done = page.locator(".answer[aria-busy=false]")
    eventually(lambda: done.count() == count == page.locator(".answer").count())
    return done.last


@pytest.mark.parametrize("size", SIZES)
def test_an_answer_streams_with_its_times(chromium: Any, live: LiveServer, size: str) -> None:
    with window(chromium, live.url, size) as opened:
        page = opened.open()
        page.wait_for_selector(".hero")
        assert not opened.is_scrolled_sideways()
        ask(page, "Once upon a time")
        answer = answered(page)
        figures = dict(zip(answer.locator("dt").all_inner_texts(), answer.locator("dd").all_inner_texts(), strict=True))
        assert figures["TTFT"].endswith("ms") and figures["speed"].endswith("tokens/s")
        assert answer.locator("> .text").inner_text()
        assert answer.locator(".split svg").get_attribute("aria-label").startswith("queue ")
        assert "stories-chat" in page.title()
        assert not opened.is_scrolled_sideways()


def test_the_answer_is_the_api_s(chromium: Any, live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 12, "temperature": 0}
    expected = live.post("chat/completions", **body).json()["choices"][0]["message"]["content"]
    with window(chromium, live.url) as opened:
        page = opened.open()
        page.get_by_label("Max tokens").fill("12")
        page.get_by_label("Temperature").fill("0")
        ask(page, "Once")
        assert answered(page).locator("> .text").inner_text().split() == expected.split()


def test_tokens_show_their_probabilities_to_the_keyboard(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open()
        page.get_by_label("Max tokens").fill("8")
        ask(page, "Once")
        answer = answered(page)
        answer.get_by_role("button", name="Token probabilities").click()
        tokens = answer.get_by_role("option")
        assert tokens.count() == 8
        answer.get_by_role("listbox").focus()
        page.keyboard.press("ArrowRight")
        assert tokens.nth(1).get_attribute("aria-selected") == "true"
        assert "Token 2" in answer.locator(".inspector").inner_text()
        shares = answer.locator(".inspector td.num").all_inner_texts()
        assert len(shares) >= 5
        assert abs(sum(float(share.removesuffix(" %")) for share in shares) - 100) < 3
        tokens.nth(4).hover()
        assert "Token 5" in answer.locator(".inspector").inner_text()


def test_stop_ends_the_answer_and_the_request(chromium: Any, chat_model: Path) -> None:
    with gated_serving(chat_model) as (server, gate), window(chromium, server.url) as opened:
        page = opened.open()
        page.get_by_label("Max tokens").fill("200")
        gate.release(5)
        ask(page, "Once")
        eventually(lambda: len(page.locator(".answer > .text").inner_text()) > 2)
        page.get_by_role("button", name="Stop").click()
        assert "Stopped." in answered(page).inner_text()
        gate.open()
        eventually(lambda: server.engine.num_unfinished == 0)
        assert page.get_by_role("button", name="Send").is_visible()


def test_editing_drops_what_came_after(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open()
        page.get_by_label("Max tokens").fill("4")
        bodies: list[dict] = []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        ask(page, "First")
        answered(page)
        ask(page, "Second")
        answered(page, 2)
        assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Edit the message").fill("Other")
        page.get_by_role("button", name="Send again").click()
        answered(page)
        assert [message["content"] for message in bodies[2]["messages"]] == ["Other"]
        page.get_by_role("button", name="Try again").click()
        answered(page)
        assert bodies[3]["messages"] == bodies[2]["messages"]


@pytest.mark.parametrize("size", SIZES)
def test_the_end_of_an_answer_and_an_error_are_in_sight(chromium: Any, live: LiveServer, size: str) -> None:
    with window(chromium, live.url, size) as opened:
        opened.expected = ("status of 400",)
        page = opened.open()
        for number, text in enumerate(("First", "Second", "many words " * 400), start=1):
            ask(page, text)
            end = answered(page, number).locator(".times").bounding_box()
            assert end["y"] + end["height"] <= page.locator(".composer").bounding_box()["y"]


def test_what_was_refused_does_not_refuse_what_comes_after(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        opened.expected = ("status of 400",)
        page = opened.open()
        page.get_by_label("Max tokens").fill("4")
        bodies: list[dict] = []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        ask(page, "First")
        answered(page)
        ask(page, "many words " * 400)
        assert "maximum context length" in answered(page, 2).get_by_role("alert").inner_text()
        ask(page, "Second")
        assert "tokens" in answered(page, 3).locator(".times").inner_text()
        assert [message["content"] for message in bodies[2]["messages"]][::2] == ["First", "Second"]


def test_errors_are_in_the_server_s_words(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        opened.expected = ("status of 400",)
        page = opened.open()
        page.get_by_label("Temperature").fill("-1")
        ask(page, "Once")
        body = {"messages": [{"role": "user", "content": "Once"}], "temperature": -1}
        expected = live.post("chat/completions", **body).json()["error"]["message"]
        assert expected in answered(page).get_by_role("alert").inner_text()


def test_a_model_that_cannot_converse_continues(chromium: Any, plain: LiveServer) -> None:
    with window(chromium, plain.url, "phone") as opened:
        page = opened.open()
        assert "tells no roles apart" in page.locator(".hero").inner_text()
        page.fill("#prompt", "import os\n")
        page.get_by_role("button", name="Continue", exact=True).click()
        answer = answered(page)
        assert answer.locator("> .text").inner_text()
        answer.get_by_role("button", name="Token probabilities").click()
        assert answer.get_by_role("option").count() > 3
        assert not opened.is_scrolled_sideways()


def test_a_key_is_asked_for_until_it_is_right(chromium: Any, chat_model: Path) -> None:
    with serving(new_engine(chat_model), api_key="secret") as server, window(chromium, server.url) as opened:
        opened.expected = ("status of 401",)
        page = opened.open()
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("a valid API key").wait_for()
        page.get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector(".hero")
        ask(page, "Once")
        assert answered(page).locator("dd").count() >= 5
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert "secret" not in page.url


def test_hostile_text_stays_text(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open()
        page.wait_for_selector(".hero")
        script = """async (text) => {
            const { markdown } = await import('/ui/markdown.js');
            const box = document.createElement('div');
            box.append(...markdown(text));
            document.body.append(box);
            const names = [...box.querySelectorAll('*')].map((node) => node.localName);
            const links = [...box.querySelectorAll('[href],[src]')].map((node) => node.getAttribute('href'));
            return [[...new Set(names)].sort(), links, box.textContent];
        }"""
        names, links, text = page.evaluate(script, HOSTILE)
        allowed = ("code", "div", "em", "li", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul")
        assert set(names) <= {*allowed, "a"}
        assert all(link.startswith(("http://", "https://")) for link in links)
        assert "<script>" in text and "<iframe" in text and "javascript:alert(1)" in text
        assert "taken" not in page.title()
        assert page.evaluate(script, "**a** [b](https://example.org/x)")[1] == ["https://example.org/x"]
