"""Live and Steps in a browser, on a server, on simulated runs and on a journal's file."""

import json
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, eventually

from browser import SIZES, chromium, window
from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError
from ridgeline.core.words import counted
from ridgeline.engine.recording import read_recording

__all__ = ["chromium"]

METRICS = """\
# HELP ridgeline_ttft_seconds Arrival to first token.
ridgeline_ttft_seconds_bucket{le="0.1"} %d.0
ridgeline_ttft_seconds_bucket{le="0.2"} %d.0
ridgeline_ttft_seconds_bucket{le="+Inf"} %d.0
ridgeline_kv_blocks{group="0",state="free"} 1e+03
"""


PRICED = """\
ridgeline_priced_steps_total {steps}
ridgeline_priced_step_seconds_total {measured}
ridgeline_priced_step_predicted_seconds_total{{provenance="calibrated"}} {predicted}
ridgeline_priced_step_limit_seconds_total{{bound="compute"}} {compute}
ridgeline_priced_step_limit_seconds_total{{bound="memory"}} {memory}
"""


@pytest.mark.parametrize("size", SIZES)
def test_live_shows_what_runs(chromium: Any, live: LiveServer, size: str) -> None:
    with window(chromium, live.url, size) as opened:
        page = opened.open("/#live")
        page.get_by_role("heading", name="Live").wait_for()
        page.get_by_text("Nothing runs.").wait_for()
        live.complete(prompt="Once", max_tokens=50, temperature=0)
        tile = page.get_by_role("article", name="TPOT")
        tile.get_by_text("ms p50").wait_for()
        assert page.get_by_role("article", name="KV cache").locator(".value").inner_text().endswith("%")
        assert "now" in tile.get_by_role("img").get_attribute("aria-label")
        page.get_by_role("button", name="As table").click()
        assert page.get_by_role("table").locator("thead th").count() == 9
        assert not opened.is_scrolled_sideways()


def test_live_shows_three_times_of_a_step_apart(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        counts = iter(range(1, 100))

        def told(route: Any) -> None:
            count = next(counts)
            limit = {"compute": 0.0005 * count, "memory": 0.002 * count}
            route.fulfill(body=PRICED.format(steps=count, measured=0.004 * count, predicted=0.003 * count, **limit))

        opened.page.route("**/metrics", told)
        page = opened.open("/#live")
        card = page.get_by_role("article", name="A step's three times")
        card.get_by_text("4 ms", exact=True).wait_for()
        texts = [row.locator("th, td").all_inner_texts() for row in card.locator("tr").all()]
        assert [row[:2] for row in texts] == [["limit", "2.5 ms"], ["predicted", "3 ms"], ["measured", "4 ms"]]
        assert texts[0][2] == "measured ceilings; memory binds most" and texts[1][2] == "calibrated"
        assert texts[2][2].startswith("measured: ")
        opened.page.unroute("**/metrics")


@pytest.mark.parametrize("tells", ["process_start_time_seconds", "ridgeline_step_duration_seconds_count"])
def test_a_server_that_was_started_anew_counts_from_nothing(chromium: Any, live: LiveServer, tells: str) -> None:
    with window(chromium, live.url) as opened:
        counts = iter([100, 200, *range(1, 100)])

        def told(route: Any) -> None:
            count = next(counts)
            figures = {"measured": 0.004 * count, "predicted": 0.003 * count, "compute": 0.0, "memory": 0.002 * count}
            began = f"{tells} {2.0 if count >= 100 else 1.0}\n"
            route.fulfill(body=began + PRICED.format(steps=count, **figures))

        opened.page.route("**/metrics", told)
        card = opened.open("/#live").get_by_role("article", name="A step's three times")
        card.get_by_text("measured: 100 steps").wait_for()
        card.get_by_text("measured: 2 steps").wait_for()


def test_what_no_step_was_priced_for_is_unknown(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        opened.page.route("**/metrics", lambda route: route.fulfill(body="ridgeline_num_requests_running 0\n"))
        page = opened.open("/#live")
        card = page.get_by_role("article", name="A step's three times")
        card.get_by_text("unknown: ").first.wait_for()
        assert card.get_by_text("–", exact=True).count() == 3
        opened.page.unroute("**/metrics")


def test_quantiles_are_of_what_came_between_two_samples(chromium: Any, live: LiveServer) -> None:
    script = """async ([first, last]) => {
        const { parse, quantile } = await import('/ui/live.js');
        const [before, after] = [parse(first), parse(last)];
        const of = (q) => quantile(before, after, 'ttft_seconds', q);
        return [of(0.5), of(0.95), quantile(after, after, 'ttft_seconds', 0.5), after.get('kv_blocks')];
    }"""
    with window(chromium, live.url) as opened:
        page = opened.open()
        page.wait_for_selector(".hero")
        half, most, none, blocks = page.evaluate(script, [METRICS % (4, 4, 4), METRICS % (4, 14, 14)])
    assert half == pytest.approx(0.15) and most == pytest.approx(0.195)
    assert none is None
    assert blocks == [[{"group": "0", "state": "free"}, 1000]]


def test_live_goes_on_after_the_server_was_away(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        opened.expected = ("ERR_FAILED", "net::")
        page = opened.open("/#live")
        page.get_by_text("Nothing runs.").wait_for()
        page.route("**/metrics", lambda route: route.abort())
        page.route("**/ready", lambda route: route.abort())
        page.get_by_text("The server does not answer").wait_for()
        page.unroute("**/metrics")
        page.unroute("**/ready")
        page.get_by_text("The server does not answer").wait_for(state="hidden")


@pytest.mark.parametrize("size", SIZES)
def test_simulated_runs_step_by_keyboard_side_by_side(chromium: Any, live: LiveServer, size: str) -> None:
    with window(chromium, live.url, size) as opened:
        page = opened.open("/#steps")
        page.get_by_label("Run A", exact=True).first.wait_for()
        page.get_by_label("Two side by side").check()
        pane = page.locator(".pane").first
        assert pane.locator(".detail h2").inner_text().startswith("Step 1 ")
        page.get_by_role("button", name="Step on").click()
        page.keyboard.press("ArrowRight")
        assert pane.locator(".detail h2").inner_text().startswith("Step 3 ")
        assert "sequences" in pane.locator(".lanes svg").get_attribute("aria-label")
        page.keyboard.press("ArrowLeft")
        assert pane.locator(".detail h2").inner_text().startswith("Step 2 ")
        assert page.locator(".pane:visible").count() == 2
        page.get_by_role("button", name="Play").click()
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Last step").click()
        assert not opened.is_scrolled_sideways()


def test_every_simulated_run_can_be_shown(chromium: Any, live: LiveServer) -> None:
    with window(chromium, live.url) as opened:
        page = opened.open("/#steps")
        source = page.locator("#source-A")
        source.locator("option").nth(8).wait_for(state="attached")
        runs = [
            name for name in source.locator("option").all_inner_texts() if "live" not in name and "open" not in name
        ]
        assert len(runs) >= 8
        seen = set()
        for name in runs:
            source.select_option(label=name)
            seen.add(page.locator(".overview svg").first.get_attribute("aria-label"))
            if name == "too small a cache":
                for _ in range(128):
                    if page.get_by_text("Preempted sequence").count():
                        break
                    page.get_by_role("button", name="Step on").click()
                assert page.get_by_text("Preempted sequence").count() == 1
        assert len(seen) == len(runs)


def test_the_map_of_blocks_is_the_cache_s(chromium: Any, live: LiveServer) -> None:
    """What the map shows is what `used` counts, and a shared prefix is shared."""
    with window(chromium, live.url) as opened:
        page = opened.open("/#steps")
        for run, shared in (("shared prefix, cached", True), ("too small a cache", False)):
            page.locator("#source-A").select_option(label=run)
            for _ in range(9):
                page.get_by_role("button", name="Step on").click()
            detail = page.locator(".detail").first
            cells = [text for text in detail.locator(".cells i").all_inner_texts() if text]
            used = detail.locator(".split figcaption").last.inner_text()
            assert f"used {len(cells)} blocks" in used
            assert any("×" in text for text in cells) == shared


def test_live_steps_are_the_engine_s(chromium: Any, live: LiveServer) -> None:
    live.complete(prompt="Once", max_tokens=5, temperature=0)
    with window(chromium, live.url) as opened:
        page = opened.open("/#steps")
        page.locator("#source-A").select_option("live")
        number = live.engine.journal.steps.num_written
        page.get_by_text(f"Step {number}").first.wait_for()
        assert "decodes 1 token" in page.locator(".detail").first.inner_text()
        live.complete(prompt="Once", max_tokens=3, temperature=0)
        eventually(lambda: live.engine.journal.steps.num_written == number + 3)
        page.get_by_text(f"Step {number + 3}").first.wait_for()


def test_a_journal_s_file_shows_its_steps(chromium: Any, live: LiveServer, chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    llm = LLM(str(chat_model), dtype="float32", journal=str(path), max_num_seqs=2, max_num_batched_tokens=8)
    llm.generate(["Once upon a time there was a little dog", "Once"], SamplingParams(max_tokens=6), use_tqdm=False)
    llm.engine.loop.close()
    with window(chromium, live.url) as opened:
        page = opened.open("/#steps")
        page.get_by_label("Journal").first.set_input_files(path)
        page.get_by_text("run.journal: ").wait_for()
        pane = page.locator(".pane").first
        assert "Admitted sequence 0" in pane.inner_text()
        assert "prefill" in pane.locator(".detail").inner_text()
        page.get_by_label("Journal").first.set_input_files(
            {"name": "short", "mimeType": "application/octet-stream", "buffer": path.read_bytes()[:-9]}
        )
        page.get_by_text("it was cut off").wait_for()
        page.get_by_label("Journal").first.set_input_files(
            {"name": "other", "mimeType": "application/octet-stream", "buffer": json.dumps({}).encode()}
        )
        page.get_by_text("This is no journal").wait_for()


def test_of_a_journal_that_was_cut_off_what_is_whole_is_shown(
    chromium: Any, live: LiveServer, chat_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.journal"
    llm = LLM(str(chat_model), dtype="float32", journal=str(path), max_num_seqs=2, max_num_batched_tokens=8)
    llm.generate(["Once upon a time there was a little dog", "Once"], SamplingParams(max_tokens=6), use_tqdm=False)
    llm.engine.loop.close()
    data = path.read_bytes()
    told = []
    with window(chromium, live.url) as opened:
        page = opened.open("/#steps")
        for number, end in enumerate(range(len(data) // 8, len(data), len(data) // 8)):
            path.write_bytes(data[:end])
            try:
                steps = len(read_recording(path).steps)
            except ConfigError:
                steps = 0
            file = {"name": f"cut-{number}", "mimeType": "application/octet-stream", "buffer": data[:end]}
            page.get_by_label("Journal").first.set_input_files(file)
            if steps:
                page.get_by_text(f"cut-{number}: {chat_model}, {counted(steps, 'step')}. It was cut off").wait_for()
            else:
                page.get_by_role("alert").filter(has_text="It was cut off before its first steps").wait_for()
            told.append(steps)
    assert 0 in told and max(told) > 5


def test_another_model_behind_the_address_is_named_and_a_conversation_goes_on_with_it(
    chromium: Any, live: LiveServer
) -> None:
    another = {**live.client.get("/explain/server").json(), "models": ["another"]}
    with window(chromium, live.url) as opened:
        opened.expected = ("404",)
        page = opened.open("/#live")
        page.get_by_text("Nothing runs.").wait_for()
        page.get_by_role("link", name="Plan").click()
        page.get_by_role("option", name="stories-chat (served here)").wait_for(state="attached")
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("Message").fill("Once")
        page.keyboard.press("Enter")
        page.locator(".answer[aria-busy=false]").wait_for()
        page.route("**/explain/server", lambda route: route.fulfill(json=another))
        page.locator("#served", has_text="another").wait_for()
        assert page.title() == "Chat · another · Ridgeline"
        assert page.locator(".answer").count() == 1
        page.get_by_label("Message").fill("More")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["model"] == "another"
        page.get_by_role("link", name="Plan").click()
        page.get_by_role("option", name="another (served here)").wait_for(state="attached")
