"""Results in a notebook: frames of the real pandas, tables in HTML, and functions that take what one types there."""

import json
from html.parser import HTMLParser

import pytest

from ridgeline import explain
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.engine.recording import FileRecorder
from ridgeline.explain import planner
from ridgeline.explain.limits import MODELS
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.simulation import run_simulated

CARD = {"hardware": "h100-sxm"}
WORKLOAD = "fixed:num_requests=6,input_tokens=32,output_tokens=4"


@pytest.fixture(scope="module")
def results():
    """One of each, by name, with the number of records that its frame and its table have."""
    standard = planner.SEQUENCES, planner.BUDGETS
    planner.SEQUENCES, planner.BUDGETS = (4, 64), (128, 512)
    try:
        plan = explain.plan("llama-3-8b", WORKLOAD, **CARD)
    finally:
        planner.SEQUENCES, planner.BUDGETS = standard
    config = EngineConfig.of("python-1m", max_model_len=512, max_num_seqs=1)
    requests = [BenchRequest(prompt=[5, 6, i + 9], max_tokens=30, arrival_s=0.0) for i in range(12)]
    price, simulation = explain.price("llama-3-8b"), explain.simulate("llama-3-8b", workload=WORKLOAD, **CARD)
    recording = run_simulated(simulated_machine(config), requests).recording
    diagnosis, life = explain.doctor(recording), explain.life(recording, 1)
    rounds = explain.break_even("python-1m", "h100-sxm", 256, speculate="ngram")
    ways, lecture = explain.devices("llama-3-8b"), explain.lecture()
    return {
        "price": (price, len(price.groups), len(price.groups)),
        "simulation": (simulation, 6, 4),
        "plan": (plan, len(plan.candidates), len(plan.front)),
        "diagnosis": (diagnosis, len(diagnosis.findings), len(diagnosis.lines())),
        "devices": (ways, len(ways.ways), len(ways.ways)),
        "lecture": (lecture, len(lecture.rows), len(lecture.rows)),
        "life": (life, len(life["steps"]), len(life["steps"])),
        "replay": (explain.replay(recording), 1, 1),
        "break_even": (rounds, len(rounds.rounds), len(rounds.rounds)),
        "exploration": (explain.explore("kv"), len(explain.explore("kv").figures), len(explain.explore("kv").figures)),
    }


class Table(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append(0)
        elif tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


NAMES = (
    "price", "simulation", "plan", "diagnosis", "devices", "lecture", "life", "replay", "break_even", "exploration"
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_frame(results, name):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: to_pandas() is NOT tested")
    result, num_records, _ = results[name]
    found = result.to_pandas()
    assert isinstance(found, pandas.DataFrame)
    assert len(found) == num_records > 0
    assert not found.columns.duplicated().any()
    numbers = found.select_dtypes("number")
    assert name in ("plan", "exploration", "lecture") or len(numbers.columns)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_table(results, name):
    result, _, num_rows = results[name]
    table = Table(result._repr_html_())
    assert not table.open
    assert len(table.rows) == 1 + num_rows
    assert len(set(table.rows)) == 1


def test_without_pandas_that_is_said(results, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    for result, _, _ in results.values():
        with pytest.raises(ConfigError, match="pandas is not installed"):
            result.to_pandas()


def test_a_plan_takes_a_workload_by_its_name(results):
    plan, _, _ = results["plan"]
    assert plan.chosen.results.completed == 6
    with pytest.raises(ConfigError, match="workload"):
        explain.plan("llama-3-8b", "nonsense", **CARD)


def test_what_one_types_is_taken_or_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_act": "silu", "rms_norm_eps": 1e-5, **MODELS["llama-3-8b"]})
    )
    assert explain.price(tmp_path).limit_s == explain.price(str(tmp_path), batch=1.0).limit_s
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0,8,2\n2024-05-10 00:00:01.0,8,2\n"
    )
    assert explain.simulate("llama-3-8b", trace=str(tmp_path / "azure.csv"), **CARD).results.completed == 2
    assert explain.plan("llama-3-8b", WORKLOAD, slos="ttft=10s", budgets=(512,), **CARD).is_met
    for ask, said in (
        (lambda: explain.price("llama-3-8b", batch=1.5), "batch must be between"),
        (lambda: explain.price("llama-3-8b", context="9"), "context must be between"),
        (lambda: explain.devices("llama-3-8b", count=2.5), "count must be between"),
        (lambda: explain.plan("llama-3-8b", WORKLOAD, slos="ttft=nan", **CARD), "objective"),
        (lambda: explain.break_even("python-1m", context=-5, speculate="ngram"), "context must be a number"),
        (
            lambda: explain.break_even("python-1m", context=float("nan"), speculate="ngram"),
            "context must be a number",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            ask()


def test_a_journal_is_a_file_or_a_recording(tmp_path):
    config = EngineConfig.of("python-1m", max_model_len=512)
    requests = [BenchRequest(prompt=[5, 6, i + 9], max_tokens=9, arrival_s=0.0) for i in range(3)]
    recording = run_simulated(simulated_machine(config), requests).recording
    recorder = FileRecorder(tmp_path / "journal", recording.setup)
    for name in ("steps", "spans", "decisions", "outputs", "prompts"):
        recorder._take(name, getattr(recording, name), Reasons(recording))
    recorder.close()
    for ask in (explain.doctor, explain.replay, lambda journal: explain.life(journal, 1)):
        assert ask(recording) == ask(tmp_path / "journal") == ask(str(tmp_path / "journal"))
    assert explain.replay(recording).difference == ""


class Reasons:
    def __init__(self, recording):
        self.cache_reasons = list(recording.cache_reasons)


def test_every_function_is_there():
    assert {name for name in explain.__all__ if callable(getattr(explain, name))} == set(explain.__all__)
