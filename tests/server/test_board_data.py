"""Every query of the Grafana board has data where a server is asked for things, as Prometheus itself computes it."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from live_server import LiveServer, eventually, serving
from prometheus_client.parser import text_string_to_metric_families
from test_metrics_list import EqualCalibration, priced_hardware

from ridgeline.core.config import EngineConfig
from ridgeline.engine import priced
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server.canary import FEWEST, Canary

BOARD = Path(__file__).resolve().parents[2] / "deploy/grafana.json"
MOVING = {"one": ("op_seconds", "queue_head_wait_seconds", "priced_step_seconds")}  # what must, between two scrapes
MOVING["two"] = ("spec_decode_num_accepted_tokens", "op_seconds")
LATE = {"one": ("plan_drift_ratio", "machine_speed_ratio"), "two": ("speculation_gain_ratio",)}
FOUND = [{"id": "slots", "severity": "FIX", "gain": 2.0}]
GOT = r'expr: ("(?:[^"\\]|\\.)*"), time: 1m,\n\s+exp:.*?\n\s+got:(.*?)(?=\n\s*expr: |\Z)'
VALUE = re.compile(r"Value:|}\s+[-+\w.]")
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}
LONG = "def f(x):\n    return x + 1\n" * 6


def ask(live: LiveServer) -> None:
    """More at once than run at once, the same prompt again, drafts that are taken, refusals."""
    with ThreadPoolExecutor(6) as pool:
        same = {"prompt": LONG, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert len(list(pool.map(lambda _: live.complete(**same), range(6)))) == 6
    assert live.post("completions", prompt="a", temperature=-1).status_code == 400


def series(text: str, instance: str) -> dict[str, float]:
    """A scrape's samples by their selectors, with the label that a scrape adds."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {"instance": instance, **sample.labels}
            written = ", ".join(f'{key}="{value}"' for key, value in labels.items())
            found[f"{sample.name}{{{written}}}"] = sample.value
    return found


@pytest.fixture(scope="module")
def scrapes() -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Two scrapes of each of two servers, with requests before: of one whose steps are priced, of one that drafts."""
    found: tuple[dict[str, float], dict[str, float]] = ({}, {})
    canary = Canary(10**9, "python-1m", {}, "int8")
    for _ in range(FEWEST):
        canary._take_in(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priced, "load", priced_hardware)
        patch.setattr(priced, "load_calibration", lambda *_: EqualCalibration())
        patch.setattr(priced, "PERIOD_S", 0.05)
        for instance, options in (("one", {}), ("two", {"speculate": "ngram"})):
            engine = ThreadEngine(EngineConfig.of("python-1m", num_threads=1, max_num_seqs=2, **options))
            with serving(engine, slo="ttft=60s,tpot=10s") as live:
                live.server._service.metrics.diagnosed(FOUND)
                live.server._service.watch_with(canary)
                while not all(live.metric(f"ridgeline_{name}") for name in LATE[instance]):
                    ask(live)
                for scrape in found:
                    before = {name: live.metric(f"ridgeline_{name}_total") for name in MOVING[instance]}
                    while any(live.metric(f"ridgeline_{name}_total") == value for name, value in before.items()):
                        ask(live)
                    eventually(lambda live=live: live.metric("ridgeline_num_requests_running") == 0)
                    scrape.update(series(live.client.get("/metrics").text, instance))
    yield found


def results(queries: list[str], scrapes: tuple[dict[str, float], dict[str, float]], folder: Path) -> dict[str, int]:
    """How many values each query gives at the second scrape: promtool expects none, and says what it got."""
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("NOT TESTED: data of deploy/grafana.json by promtool, for lack of it: apt-get install prometheus")
    before, after = scrapes
    inputs = [{"series": name, "values": f"{before.get(name, '_')} {value}"} for name, value in after.items()]
    checks = [{"expr": query, "eval_time": "1m", "exp_samples": []} for query in queries]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    (folder / "board.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([command, "test", "rules", "board.yaml"], cwd=folder, capture_output=True, text=True)
    told = re.findall(GOT, done.stdout + done.stderr, re.DOTALL)
    return {json.loads(query): len(VALUE.findall(got)) for query, got in told}


def test_every_panel_has_data(scrapes: tuple[dict[str, float], dict[str, float]], tmp_path: Path):
    panels: dict[str, list[str]] = {}
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            assert "$" not in query, query
            panels.setdefault(panel["title"], []).append(query)
    found = results([query for several in panels.values() for query in several], scrapes, tmp_path)
    empty = {title: several for title, several in panels.items() if not any(found.get(query) for query in several)}
    assert len(panels) > 30
    assert all("ridgeline_host_" in query for several in empty.values() for query in several), empty
    assert results(["ridgeline_nothing"], scrapes, tmp_path) == {}, "a query without data would not be found"
