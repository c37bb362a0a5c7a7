"""A start that is planned: what was left open changes, each change has its reason, and nothing else does."""

import re
from dataclasses import replace

import pytest

from ridgeline.backends.probe import this_machine
from ridgeline.bench.load import Load
from ridgeline.bench.workloads.fixed import Fixed
from ridgeline.cli import main, serve
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import parse_slos
from ridgeline.cost.hardware import INPUT_KINDS, PROBE_VERSION, Ceiling, Hardware
from ridgeline.explain import machine, start
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.simulation import run_simulated

OPEN = ["max_num_seqs", "max_num_batched_tokens"]


def slow_machine(native, isa) -> Hardware:
    """Ceilings that are the same wherever tests run."""
    return Hardware(
        machine=this_machine(native, isa), probe_version=PROBE_VERSION, measured_at="", stream_buffer_bytes=2**28,
        cache_bytes=2**20, cached_buffer_bytes=2**19, stream_bytes_per_s={1: Ceiling.of([2e9])},
        cached_bytes_per_s={1: Ceiling.of([1e10])}, reread_bytes_per_s={},
        ops_per_s={kind: {1: Ceiling.of([1e10])} for kind in INPUT_KINDS}, scalar_per_cycle=None,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", slow_machine)
    monkeypatch.setattr(start, "USERS", (16, 4, 1))
    monkeypatch.setattr(start, "BUDGETS", (64, 256))
    monkeypatch.setattr(start, "CHAT_TOKENS", (60, 12))


def config_of(**options) -> EngineConfig:
    return EngineConfig.of("python-1m", num_threads=1, dtype="float32", **options).served()


def planned(slo: str, left_open=OPEN, **options) -> EngineConfig:
    return start.planned(config_of(**options), parse_slos(slo), left_open)


def test_a_loose_objective_takes_as_many_as_are_searched():
    found = planned("ttft=100s,tpot=100s")
    assert found.scheduler.max_num_seqs == 16 and found.scheduler.max_num_batched_tokens in (64, 256)
    assert found.choices.keys() == set(OPEN)
    for name, choice in found.choices.items():
        assert choice.value == str(getattr(found.scheduler, name))
        assert re.search(r"^--slo: ttft within 100000 ms, .* for \d+% of [\d.,]+ chats/s of 60 tokens", choice.reason)
    assert "more: as many as are searched" in found.choices["max_num_seqs"].reason
    same = replace(found, choices={}, scheduler=config_of().scheduler)
    assert same == config_of(), "nothing else changes"


def test_fewer_run_at_once_where_more_would_miss_it():
    device = simulated_machine(config_of())
    _, step_s = start._seconds(device, 16)
    _, less_s = start._seconds(device, 4)
    limit_ms = 1e3 * start.SLOWER * (step_s + less_s) / 2
    found = planned(f"tpot={limit_ms:.6f}ms")
    assert found.scheduler.max_num_seqs < 16
    reason = found.choices["max_num_seqs"].reason
    assert re.search(r"more: with (16|4), (tpot is [\d.]+ ms at least|\d+% of requests would be within all)", reason)
    rate_per_s, chats = start._chats(device, found.scheduler.max_num_seqs)
    slos = parse_slos(f"tpot={limit_ms:.6f}ms")
    machine = simulated_machine(found)
    again = run_simulated(machine, chats, slos=slos, pace=lambda _, s: start.SLOWER * s).results.goodput
    assert again.attainment >= 0.95 and f"for {again.attainment:.0%} of {rate_per_s:,.3g} chats/s" in reason


@pytest.mark.parametrize("kept", OPEN)
def test_what_was_given_stays(kept: str):
    given = {"max_num_seqs": 5, "max_num_batched_tokens": 96}[kept]
    (left_open,) = set(OPEN) - {kept}
    found = planned("ttft=100s,tpot=100s", [left_open], **{kept: given})
    assert getattr(found.scheduler, kept) == given and found.choices.keys() == {left_open}


def test_what_cannot_be_planned_changes_nothing_and_is_told(caplog):
    unchanged = config_of()
    device = simulated_machine(unchanged)
    prompt_s, step_s = start._seconds(device, 1)
    tight = planned(f"ttft={1e3 * (prompt_s + step_s) / 2}")
    assert tight == unchanged and "no options meet --slo" in caplog.text and "ttft is" in caplog.text
    drafting = config_of(speculate="ngram")
    assert start.planned(drafting, parse_slos("ttft=1s"), OPEN) == drafting
    assert "speculate=ngram cannot be simulated yet" in caplog.text
    with pytest.raises(ConfigError, match=r"tpot within 0\.0001 ms cannot be: one step"):
        start.planned(unchanged, parse_slos("tpot=0.0001ms"), OPEN)


def test_chats_fit_into_a_small_context_and_keep_their_rate():
    device = simulated_machine(config_of(max_model_len=40))
    rate_per_s, chats = start._chats(device, 4)
    assert {len(chat.prompt) + chat.max_tokens for chat in chats} == {40}
    again = Load(schedule="poisson", request_rate_per_s=rate_per_s)
    assert chats[-1].arrival_s == pytest.approx(len(chats) / again.request_rate_per_s)
    assert len(Fixed(num_requests=3).requests()) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slo", "speed=1"], "objective 'speed=1' must be one of"),
        (["--slo", "ttft=1,ttft=2"], "ttft is given twice"),
        (["--slo", ""], "--slo is empty"),
        (["--slo", "tpot=0.00001ms", "--port", "0"], "cannot be: one step of python-1m"),
    ],
)
def test_bad_objectives_of_a_server_are_one_line(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "python-1m", *options])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "left_open"),
    [
        (["--slo", "ttft=500ms,tpot=50"], OPEN),
        (["--slo", "ttft=500ms", "--max-num-seqs", "8"], OPEN[1:]),
        (["--slo", "ttft=500ms", "--max-num-batched-tokens", "512"], OPEN[:1]),
        (["--slo", "ttft=500ms", "--config", "options.toml"], OPEN[1:]),
        (["--slo", "ttft=500ms", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"], None),
        ([], None),
    ],
)
def test_a_server_plans_what_was_left_open(options, left_open, monkeypatch, tmp_path):
    class Stopped(Exception):
        """Nothing is served here."""

    seen = []

    def spy(config, slos, names):
        seen.append((config.scheduler.max_itl_ratio, slos, list(names)))
        return replace(config, seed=7)

    def stop(settings, config, listener, uds):
        raise Stopped(config.seed)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.toml").write_text("max-num-seqs = 9\n")
    monkeypatch.setattr(start, "planned", spy)
    monkeypatch.setattr(serve, "_serve", stop)
    with pytest.raises(Stopped, match="0" if left_open is None else "7"):
        main(["serve", "python-1m", "--port", "0", *options])
    assert [names for _, _, names in seen] == ([] if left_open is None else [left_open])
    assert all(ratio == 3.0 and slos[0].limit_ms == 500 for ratio, slos, _ in seen), "a server's own defaults"
