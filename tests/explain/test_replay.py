"""Recorded runs of a real model come out again plan by plan, and what would not is found."""

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.params import SamplingParams, SpeculationParams
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.engine.build import build_engine
from ridgeline.engine.recording import FileRecorder, read_recording
from ridgeline.explain.lives import life
from ridgeline.explain.replaying import replay

SHARED = list(range(10, 90))


def run(path, requests, aborts=(), **options):
    """Run (prompt, parameters, step before which it comes) through python-1m, and return the recording."""
    base = {"num_threads": 1, "tuning": "default", "max_model_len": 256, "journal": str(path)}
    engine = build_engine(EngineConfig.of("python-1m", **base | options), lambda deltas: None)
    waiting = sorted(requests, key=lambda request: request[2])
    for step in itertools.count():
        while waiting and waiting[0][2] <= step:
            prompt, params, _ = waiting.pop(0)
            request = engine.intake.request(prompt, params, priority=len(prompt) % 3)
            engine.loop.submit(replace(request, client=len(prompt) % 2, call=len(prompt) % 4))
        for name in (name for name, at in aborts if at == step):
            engine.loop.abort(name)
        if not engine.loop.step() and not waiting:
            break
        assert step < 5000
    engine.loop.close()
    return read_recording(path)


def random_requests(count, seed, **params):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = random.integers(3, 500, int(random.integers(1, 120))).tolist()
        if random.random() < 0.5:
            prompt = SHARED[: int(random.integers(1, 80))] + prompt[:40]
        wanted = SamplingParams(max_tokens=int(random.integers(1, 60)), seed=7, **params)
        made.append((prompt, wanted, int(random.integers(0, 120))))
    return made


RUNS = {
    "chunks and prefix hits": (random_requests(16, 1), {"max_num_batched_tokens": 24, "max_num_seqs": 6}),
    "preemption": (random_requests(14, 2), {"kv_cache_bytes": 768 * 32 * 11, "max_num_seqs": 8}),
    "priorities": (random_requests(14, 3), {"scheduling_policy": "priority", "kv_cache_bytes": 768 * 32 * 9}),
    "forks": (random_requests(8, 4, n=3, temperature=1), {"kv_cache_bytes": 768 * 32 * 16, "max_num_seqs": 5}),
    "a bound on the time between tokens": (random_requests(12, 5), {"max_itl_s": 0.003, "max_num_seqs": 6}),
    "penalties": (random_requests(8, 7, presence_penalty=0.5), {"num_threads": 2}),
    "no prefix caching": (random_requests(8, 6), {"enable_prefix_caching": False, "block_size": 16}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_plan_is_the_same_again(tmp_path, name):
    requests, options = RUNS[name]
    recording = run(tmp_path / "journal", requests, **options)
    found = replay(recording)
    assert found.difference == ""
    assert found.num_equal == found.num_steps == len(recording.steps) > 30
    assert found.num_requests == len(requests)
    if name in ("preemption", "priorities"):
        assert (recording.decisions["kind"] == 1).any()
    if name == "chunks and prefix hits":
        assert recording.outputs["num_cached"].sum() > 0


def test_the_slots_of_a_flood_beside_another_client_are_as_they_were(tmp_path):
    """How many it had was decided by the clock, and is recorded."""
    random, flood = np.random.default_rng(2), SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    sizes = [33 if i % 12 else 8 for i in range(300)]  # of an odd number: client 1
    wanted = [(random.integers(3, 500, size).tolist(), size) for size in sizes]
    requests = [
        (prompt, flood if size == 33 else replace(flood, max_tokens=1), i) for i, (prompt, size) in enumerate(wanted)
    ]
    recording = run(tmp_path / "journal", requests, max_num_seqs=64)
    assert (recording.steps["client_slots"] > 0).any()
    found = replay(recording)
    assert (found.difference, found.num_equal) == ("", len(recording.steps))
    free = recording.steps.copy()
    free["client_slots"] = -1
    assert replay(replace(recording, steps=free)).difference


DRAFTS = {
    "always as many": ({"speculate": "ngram"}, False),
    "preemption": ({"speculate": "ngram", "kv_cache_bytes": 768 * 32 * 10}, True),
    "two threads": ({"speculate": "suffix", "num_threads": 2, "kv_cache_bytes": 768 * 32 * 10}, True),
    "a draft model": ({"speculate": "draft:python-1m", "max_num_batched_tokens": 40, "max_num_seqs": 8}, False),
    "as many as pay": ({"speculate": "auto", "num_threads": 2, "adaptive_speculation": True}, False),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_come_again_as_they_were(tmp_path, name):
    options, is_tight = DRAFTS[name]
    wanted = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    requests = [(prompt, wanted, step) for prompt, _, step in random_requests(14, 2)]
    requests += [([7, 8, 9], replace(wanted, speculation=SpeculationParams(enabled=False)), 150)]  # it runs ahead
    recording = run(tmp_path / "journal", requests, **{"adaptive_speculation": False} | options)
    assert recording.setup.strategy == "speculative"
    found = replay(tmp_path / "journal")
    assert found.difference == ""
    assert found.num_steps == len(recording.steps)
    assert (recording.decisions["kind"] == 1).any() == is_tight
    if "adaptive_speculation" in options:
        return  # who knows whether something was drafted: it hangs on the clock
    accepted = recording.spans.copy()  # had one token less been right, the next step would not be the same
    index = np.flatnonzero((accepted["num_rows"] > 2) & (accepted["num_final"] > 1))[0]
    accepted["num_final"][index] -= 1
    assert replay(replace(recording, spans=accepted)).difference


def test_steps_that_waited_for_drafts_which_none_verified_wait_again(tmp_path, monkeypatch):
    monkeypatch.setattr(DraftControl, "rests", lambda *_: False)
    monkeypatch.setattr(DraftControl, "choose", lambda _, count, survivals, room, **__: [0 for _ in survivals])
    recording = run(tmp_path / "journal", random_requests(6, 2), speculate="auto", num_threads=2, block_size=8)
    assert (recording.spans["num_rows"] == 1).all()
    assert replay(recording).difference == ""


def test_trees_of_drafts_are_not_replayed(tmp_path):
    recording = run(tmp_path / "journal", random_requests(3, 2), speculate="lookahead", adaptive_speculation=False)
    with pytest.raises(ConfigError, match="lookahead drafts trees"):
        replay(recording)


def test_conversations_go_on_from_what_was_generated(tmp_path):
    recording, prompt = None, list(range(20, 60))
    engine_requests = []
    for turn in range(3):  # each prompt holds the output of the turn before: greedy tokens of the same model
        engine_requests.append((list(prompt), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), 60 * turn))
        prompt = _continued(prompt)
    recording = run(tmp_path / "journal", engine_requests)
    assert recording.outputs["num_cached"].max() >= 96  # more than the first prompt
    assert replay(recording).difference == ""


def _continued(prompt):
    from ridgeline import LLM

    llm = LLM("python-1m", num_threads=1, tuning="default", max_model_len=256)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [*prompt, *output.outputs[0].token_ids, 5, 6]


def test_aborts_and_stops_come_again(tmp_path):
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, stop=["e", "return"])
    requests = [([4 + i] * (30 + i), params, i) for i in range(6)]
    requests += [([9] * 40, SamplingParams(max_tokens=50, ignore_eos=True), 2)] * 2
    recording = run(tmp_path / "journal", requests, aborts=[("request-3", 20), ("request-7", 31)])
    reasons = np.unique(recording.outputs["reason"])
    assert len(reasons) >= 3
    assert replay(recording).difference == ""


def test_another_limit_is_found_and_named(tmp_path, capsys):
    recording = run(tmp_path / "journal", RUNS["preemption"][0], **RUNS["preemption"][1])
    setup = recording.setup
    fewer = replace(setup.config, scheduler=replace(setup.config.scheduler, max_num_seqs=3))
    found = replay(replace(recording, setup=replace(setup, config=fewer)))
    assert found.num_equal < found.num_steps
    assert "step" in found.difference
    changed = recording.outputs.copy()
    changed["num_tokens"] -= 1  # of those that stopped: one token earlier
    changed["max_tokens"] -= 1
    assert replay(replace(recording, outputs=changed)).difference
    for arguments, code in ((["simulate", "--replay", str(tmp_path / "journal")], 0),):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == code
    assert "all plans are identical" in capsys.readouterr().out


def test_who_left_behind_the_last_step_is_in_the_recent_records(tmp_path):
    """Nothing was computed after: there is no step in which it ended."""
    engine = build_engine(EngineConfig.of("python-1m", num_threads=1, tuning="default"), lambda deltas: None)
    request = engine.intake.request([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.loop.submit(request)
    for _ in range(4):
        engine.loop.step()
    engine.loop.abort(request.request_id)
    engine.loop.process_input_queue()
    FileRecorder(tmp_path / "recent", engine.setup).write_recent(engine.loop.journal)
    recording = read_recording(tmp_path / "recent")
    assert recording.outputs["num_output"].tolist() == [4]
    assert life(recording, int(recording.outputs["seq_id"][0]))["end"] == "abort"


def test_a_journal_is_read_up_to_where_it_was_cut_off(tmp_path, caplog):
    """Wherever that is: what is left of it is a run of its own, whose steps have all their spans."""
    path = tmp_path / "journal"
    whole = run(path, RUNS["no prefix caching"][0][:3])
    data = path.read_bytes()
    found = Counter()
    for end in range(len(data) - 1, 0, -97):
        path.write_bytes(data[:end])
        caplog.clear()
        try:
            cut = read_recording(path)
        except ConfigError:  # not even one step is whole
            found["refused"] += 1
            continue
        (warning,) = caplog.messages
        assert "was cut off" in warning and str(path) in warning
        num_steps = len(cut.steps)
        assert cut.steps.tobytes() == whole.steps[:num_steps].tobytes()
        for step in cut.steps:
            assert len(cut.spans_of(step)) == step["num_spans"]
        for output in cut.outputs:
            assert len(cut.hashes_of(output)) == output["num_hashes"] and output["last_step"] < num_steps
        found[num_steps > 0] += 1
    assert found["refused"] and found[True]


def test_files_that_are_no_whole_journal(tmp_path):
    path = tmp_path / "journal"
    whole = run(path, RUNS["no prefix caching"][0][:3])
    data = path.read_bytes()
    assert b"def " not in data
    for content, said in (
        (b"", "is no journal"),
        (b"{}", "is no journal"),
        (data[:70], "was cut off within its first record"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_recording(path)
    path.write_bytes(data[:200] + b"\xff" * 30 + data[230:])
    with pytest.raises(ConfigError, match=r"cannot be read|cut off"):
        read_recording(path)
    for part, field, value, said in (
        ("steps", "first_span", 1 << 40, "steps have spans that are not there"),
        ("outputs", "first_hash", -1, "outputs have prompts that are not there"),
        ("spans", "num_tokens", 0, "a step computes nothing"),
        ("steps", "num_rounds", 0, "a step computes nothing"),
    ):
        first = getattr(whole, part)[:1]
        changed = first.copy()
        changed[field] = value
        path.write_bytes(data.replace(first.tobytes(), changed.tobytes(), 1))
        with pytest.raises(ConfigError, match=said):
            read_recording(path)
    ended = whole.outputs[whole.outputs["seq_id"] != 1]
    with pytest.raises(ConfigError, match=r"1 sequence of the journal had not ended .* \(the first is 1\)"):
        replay(replace(whole, outputs=ended))
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tmp_path / "no" / "such" / "folder", [])


def test_a_journal_goes_to_its_file_while_the_engine_runs(tmp_path):
    path = tmp_path / "journal"
    requests = [([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True), 0)] * 3
    started = time.monotonic()
    recording = run(path, requests * 2, max_num_seqs=2)
    assert recording.steps["step"].tolist() == list(range(1, len(recording.steps) + 1))
    assert len(recording.steps) >= 600  # more than are written at once
    assert recording.steps["start_s"][0] >= started
    assert sorted(recording.outputs["num_output"].tolist()) == [200] * 6
