"""Loops are found, figures are those of their pairs, and the command measures a model that is bundled."""

import gzip
import json
import math

import pytest
from benchmarks.speculation import lookup, oracle
from benchmarks.speculation.__main__ import main
from benchmarks.speculation.pairs import Pair, summarize
from benchmarks.speculation.turns import Output, Timed, Turn, in_loops, in_slices

from ridgeline import SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.cost.efficiency import Behind, Rest, TimedStep


def test_a_loop_is_a_whole_cycle_that_comes_again():
    text = list(range(100, 140))
    cycle = list(range(20))
    inside = in_loops(text + cycle + cycle + cycle[:7])
    assert inside == [False] * 60 + [True] * 27
    assert in_loops([1, 2] * 9) == [False] * 2 + [True] * 16
    assert not any(in_loops([1, 2] * 8 + text)), "14 repeated tokens are none"
    assert not any(in_loops(text[:30] + cycle + text[:30])), "a quotation is none: it comes once more, not at once"


def turn(num_tokens, seconds, tokens=None):
    ids = list(range(num_tokens)) if tokens is None else tokens
    return Turn(seconds, [Output(ids, [seconds / len(ids)] * len(ids))])


def test_a_figure_is_the_median_of_pairs_and_its_interval_that_of_order_statistics():
    pairs = [Pair(turn(10, 1.0), turn(10, 1 / ratio), {}) for ratio in range(1, 21)]
    found = summarize("any", 1, 0.0, "ngram", pairs)
    assert (found.speedup.median, found.speedup.low, found.speedup.high) == pytest.approx((10.5, 1, 20))
    assert found.speedup.interval == pytest.approx((6, 15))  # the 6th of 20 from below and from above
    assert 2 * sum(math.comb(20, k) for k in range(6)) / 2**20 <= 0.05
    assert summarize("any", 1, 0.0, "ngram", pairs[:5]).speedup.interval is None
    assert found.of_totals == pytest.approx(20 / sum(1 / ratio for ratio in range(1, 21)))


def test_what_is_outside_loops_has_its_own_time():
    """Loops three times as fast, the rest as fast as without drafts."""
    ids = [*range(100, 120), *[1, 2] * 20]
    off = Turn(60.0, [Output(ids, [1.0] * 60)])
    on = Turn(20 + 38 / 3 + 2, [Output(ids, [1.0] * 22 + [1 / 3] * 38)])
    found = summarize("any", 1, 0.0, "ngram", [Pair(off, on, {})])
    assert found.speedup_outside_loops.median == pytest.approx(1.0)
    assert found.share_in_loops == pytest.approx(38 / 60)
    assert found.speedup.median > 1.7


def test_the_command_measures_a_bundled_model(tmp_path):
    problem = {"prompt": "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"}
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(problem).encode()))
    command = (
        "--model python-1m --domains humaneval --batches 1 2 --temperatures 0 --pairs 2 --max-tokens 24 --threads 1"
    )
    main(
        [
            *command.split(),
            "--engine",
            "deterministic=true",
            "adaptive_speculation=false",
            f"--data={tmp_path}",
            f"--out={tmp_path}",
        ]
    )
    (path,) = tmp_path.glob("*/*-speculation-python-1m.json")
    cells = json.loads(path.read_text())["cells"]
    assert [cell["batch"] for cell in cells] == [1, 2]
    for cell in cells:
        assert cell["same_tokens"] == 1.0
        assert len(cell["ratios"]) == 2
        assert cell["mean_accepted_length"] > 1


def test_oracle_drafts_are_accepted_as_often_as_was_asked(tmp_path):
    command = "--model python-1m --acceptance 0.5 1 --lengths 3 --batches 1 2 --formats bf16 --tokens 48 --pairs 1"
    oracle.main([*command.split(), "--deterministic", "--threads", "1", f"--out={tmp_path}"])
    (path,) = tmp_path.glob("*/*-speculation-oracle-python-1m.json")
    report = json.loads(path.read_text())
    assert [(cell["batch"], cell["acceptance"]) for cell in report["cells"]] == [(1, 0.5), (1, 1), (2, 0.5), (2, 1)]
    for cell in report["cells"]:
        assert cell["accepted_share"] == pytest.approx(cell["acceptance"], abs=0.2)
        assert cell["predicted"] > 0 and len(cell["measured"]) == 1
        assert cell["error"] == pytest.approx(cell["predicted"] / cell["measured"][0] - 1)


def test_what_prompts_take_is_in_no_rate_of_the_oracle():
    outputs = [Output([1] * 5, [3.0, 0.5, 0.5, 0.5, 0.5]), Output([1] * 3, [2.0, 1.5, 1.5])]
    assert oracle.decode_rate(Turn(5.0, outputs)) == pytest.approx((4 + 2) / (5.0 - 3.0))


def test_a_lookup_is_timed(tmp_path):
    lookup.main(["--context", "2000", "--calls", "200", f"--out={tmp_path}"])
    (path,) = tmp_path.glob("*/*-lookup.json")
    assert all(0 < row["call_us"] <= row["call_us_99"] for row in json.loads(path.read_text())["rows"])


def test_engines_take_turns_and_the_clock_of_who_waits_stands_still():
    now_s, said = [0.0], []
    engines = [Timed(EngineConfig.of("python-1m", num_threads=1), lambda: now_s[0]) for _ in range(2)]

    def watched(name, step):
        def stepping():
            said.append(name)
            now_s[0] += 0.02 if name else 0.01
            return step()

        return stepping

    for name, engine in enumerate(engines):
        engine.engine.loop.step = watched(name, engine.engine.loop.step)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)]
    one, other = in_slices(engines, [[5, 6, 7]], params, 0.04)
    assert said[:8] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert one.seconds == pytest.approx(0.01 * said.count(0))
    assert other.seconds == pytest.approx(0.02 * said.count(1))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_time_that_counts_begins_with_the_last_first_token():
    now_s = [0.0]
    engine = Timed(EngineConfig.of("python-1m", num_threads=1), lambda: now_s[0], decoding_alone=True)
    step = engine.engine.loop.step

    def stepping():
        now_s[0] += 1.0
        return step()

    engine.engine.loop.step = stepping
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 12)]
    turn = engine.run([[5, 6, 7], [8, 9, 10]], params)
    before = [output.num_before for output in turn.outputs]
    counted = [len(output.token_ids) - count for output, count in zip(turn.outputs, before, strict=True)]
    assert min(before) == 1 and sum(counted) + sum(before) == 15
    assert turn.rate == pytest.approx(sum(counted) / turn.seconds) and turn.seconds < now_s[0]
    assert turn.rate_outside_loops is None or turn.rate_outside_loops <= 2.0


def test_what_a_round_takes_beside_the_model_is_counted_once():
    """A step with drafts is not priced as one that computes prompts, whose rest is another."""

    class Twice:
        rest = Rest(1.0, 0.0, anew_s=50.0, came_s=70.0)

        def __init__(self, rest=rest):
            self.rest = rest

        def with_rest(self, rest):
            return Twice(rest)

        def seconds(self, load):
            behind = Behind(0) if load.num_tokens > 1 else Behind()
            return self.rest.of(TimedStep(2.0 * load.num_tokens, load.num_tokens, 1, behind, 0.0))

    assert oracle.predict(Twice(), 1, 1, 1.0, 64, 5.0) == pytest.approx(2 * (2 + 1) / (4 + 5))
