"""Learn and Numbers in a browser: what they show is what `ridgeline explain` prints."""

from typing import Any

import pytest
from live_server import LiveServer

from browser import SIZES, chromium, window
from ridgeline.explain import explorers, lectures
from ridgeline.explain.practice import questions

__all__ = ["chromium"]


@pytest.mark.parametrize("size", SIZES)
def test_every_idea_shows_its_figures(chromium: Any, live: LiveServer, size: str) -> None:
    with window(chromium, live.url, size) as opened:
        page = opened.open("/#learn")
        ideas = page.locator(".ideas .list button")
        ideas.first.wait_for()
        assert ideas.count() == len(explorers.names()) + 1
        for index, name in enumerate(explorers.names()):
            ideas.nth(index).click()
            said = explorers.explore(name)
            card = page.locator(".ideas article")
            assert card.locator(".result > p").inner_text() == said.sentence
            assert card.locator("td.strong").all_inner_texts() == [figure.text for figure in said.figures]
            assert card.locator(".curve svg").count() == len(said.series)
            shown = [row.inner_text().split("\n") for row in card.locator(".cells p").all()]
            assert [[each for each in row if each] for row in shown] == [
                [label, *(cell for cell in cells if cell)] for grid in said.grids for label, cells, _ in grid.rows
            ]
            assert not opened.is_scrolled_sideways()


def test_a_slider_moves_to_what_python_computes(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open("/#learn")
        slider = page.get_by_label("layers", exact=True)
        slider.focus()
        page.keyboard.press("ArrowRight")
        layers = int(slider.get_attribute("aria-valuetext"))
        assert layers != explorers.inputs_of("kv")["layers"].default
        shown = page.locator(".ideas td.strong").all_inner_texts()
        assert shown == [figure.text for figure in explorers.explore("kv", layers=layers).figures]
        assert page.get_by_text(f"ridgeline explain kv --layers {layers}").count() == 1
        page.get_by_label("batch", exact=True).focus()
        page.keyboard.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == str(explorers.inputs_of("kv")["layers"].default)


def test_every_stop_of_a_slider_says_what_python_computes(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open("/#learn")
        for name, field in (
            ("paging", "outputs"),
            ("scheduling", "slots"),
            ("batching", "context"),
            ("stack", "drafts"),
        ):
            page.locator(".ideas .list button").nth(explorers.names().index(name)).click()
            slider = page.get_by_label(field.replace("_", " "), exact=True)
            for stop in range(int(slider.get_attribute("max")) + 1):
                slider.fill(str(stop))
                said = explorers.explore(name, **{field: int(slider.get_attribute("aria-valuetext").replace(",", ""))})
                card = page.locator(".ideas article")
                assert card.locator(".result > p").inner_text() == said.sentence
                rows = [[each.text, each.formula, each.provenance] for each in said.figures]
                assert [row.locator("td").all_inner_texts() for row in card.locator("tbody tr").all()] == rows
                assert card.locator(".cells p").count() == sum(len(grid.rows) for grid in said.grids)


def test_every_question_is_answered_by_keyboard(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open("/#learn")
        for question in questions():
            page.locator(".ideas .list button").nth(explorers.names().index(question.explorer)).click()
            practice = page.get_by_role("region", name="Practice")
            assert practice.locator("h3").inner_text() == question.ask
            assert practice.locator("button").all_inner_texts() == [each.figure.text for each in question.answers]
            for index, answer in enumerate(question.answers):
                practice.locator("button").nth(index).press("Enter")
                verdict = f"{'Right' if answer.is_right else 'No'}: {answer.why}."
                assert practice.get_by_role("status").inner_text() == verdict


@pytest.mark.parametrize("size", SIZES)
def test_a_request_is_walked_through(chromium: Any, live: LiveServer, size: str) -> None:
    with window(chromium, live.url, size) as opened:
        page = opened.open("/#learn")
        page.get_by_role("button", name="A request, step by step").press("Enter")
        stages = page.locator(".walk > li")
        stages.first.wait_for()
        assert stages.count() == 7
        assert "POST /v1/completions HTTP/1.1" in stages.nth(0).inner_text()
        assert stages.nth(4).locator("tbody tr").count() == 8
        assert "measured" in stages.nth(4).inner_text() and page.get_by_text("python-9m on").count() == 1
        assert not opened.is_scrolled_sideways()
        page.locator(".ideas .list button").first.press("Enter")
        page.locator(".sliders").wait_for()


@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_found_by_status_and_word(chromium: Any, live: LiveServer, size: str) -> None:
    rows = lectures.rows()
    with window(chromium, live.url, size) as opened:
        page = opened.open("/#numbers")
        page.locator(".number").first.wait_for()
        assert page.locator(".number .right").all_inner_texts() == [row.sentence() for row in rows]
        page.get_by_role("button", name="a slip").click()
        slips = [row.sentence() for row in rows if row.status == "✗"]
        assert page.locator(".number .right").all_inner_texts() == slips
        page.get_by_label("Search").fill("no such word at all")
        assert page.get_by_text(f"0 of {len(rows)} numbers").count() == 1
        assert not opened.is_scrolled_sideways()
