"""A speed-up dissected: values of known games, systems that compute the same, techniques that cannot be named so."""

import itertools
import json
import math

import pytest

from ridgeline.bench import ablate as ablation
from ridgeline.bench.ablate import NEEDS, WORDS, _closed_without, _feasible, _shapley, ablate
from ridgeline.bench.workloads import parse_workload
from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError

CHAIN = ["native", "kv_cache", "batching", "continuous", "prefix"]


def by_all_orders(order, value):
    """Mean logarithms over the orders themselves, one by one."""
    fits = [
        way
        for way in itertools.permutations(order)
        if all(NEEDS[each] is None or way.index(NEEDS[each]) < way.index(each) for each in order)
    ]
    worth = dict.fromkeys(order, 0.0)
    for way in fits:
        for count, each in enumerate(way):
            after, before = frozenset(way[: count + 1]), frozenset(way[:count])
            worth[each] += math.log(value[after] / value[before]) / len(fits)
    return {each: math.exp(log) for each, log in worth.items()}


def test_shapley_is_the_mean_over_all_orders_in_which_each_comes_behind_what_it_needs():
    value = {stack: 1 + sum(3 ** CHAIN.index(each) for each in stack) * len(stack) for stack in _feasible(CHAIN)}
    assert len(value) == 2 * 7  # native or not; no cache, or cache with 3 ways of batching, and prefixes or not
    found = _shapley(CHAIN, value)
    assert found == pytest.approx(by_all_orders(CHAIN, value))
    assert math.prod(found.values()) == pytest.approx(value[frozenset(CHAIN)] / value[frozenset()])


def test_what_multiplies_is_worth_its_factor_whatever_the_order():
    factors = dict(zip(CHAIN, (2.0, 7.0, 1.5, 1.2, 1.1)))
    value = {stack: math.prod(factors[each] for each in stack) for stack in _feasible(CHAIN)}
    assert _shapley(CHAIN, value) == pytest.approx(factors)


def test_without_one_is_without_those_that_need_it():
    assert _closed_without(frozenset(CHAIN), "kv_cache") == {"native"}
    assert _closed_without(frozenset(CHAIN), "batching") == {"native", "kv_cache", "prefix"}
    assert _closed_without(frozenset(CHAIN), "native") == set(CHAIN) - {"native"}
    assert WORDS.keys() == NEEDS.keys()


def test_systems_compute_the_same_and_their_factors_multiply():
    order = ["kv_cache", "batching", "continuous", "chunked", "prefix", "speculation"]
    config = EngineConfig.of("python-1m", dtype="float32", num_threads=1, tuning="default", max_num_seqs=4)
    workload = parse_workload("fixed:num_requests=6,input_tokens=24,output_tokens=5")
    seen = []
    report = ablate(
        config, workload, order, name="a", repeats=2, all_subsets=False, on_run=lambda stack, rate: seen.append(stack)
    )
    assert [each.technique for each in report.contributions] == order
    half = len(seen) // 2
    assert seen[:half] == seen[half:]  # in turn
    assert len(set(seen)) == half == len(report.systems)
    assert not any(each.is_lossy for each in report.contributions)
    assert all(each.outputs_equal_to_first == 6 for each in report.systems)
    assert all(each.shapley is None and each.marginal > 0 for each in report.contributions)
    assert report.systems[0].techniques == []
    assert report.systems[len(order)].techniques == order
    assert report.systems[0].latencies is None
    assert report.systems[len(order)].latencies.ttft_ms.p50 > 0


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        (frozenset(), ("reference", False, None, "off", 8192)),
        (frozenset(("native", "kv_cache", "prefix", "int8")), ("auto", True, "int8", "off", 8192)),
        (frozenset(("kv_cache", "speculation", "chunked")), ("reference", False, None, "ngram", 64)),
    ],
)
def test_what_is_off_is_off(on, expected):
    config = EngineConfig.of("python-1m", max_num_batched_tokens=64)
    techniques = [each for each in NEEDS if each != "int4"]
    found = ablation._System(config, techniques, on)._configured()
    options = found.backend.backend, found.cache.prefix_caching, found.quantize.scheme, found.speculation.speculate
    assert (*options, found.scheduler.max_num_batched_tokens) == expected
    assert ablation._System(config, ["kv_cache"], frozenset())._configured() == config  # others are as they were


@pytest.mark.parametrize(
    ("techniques", "said"),
    [(["nothing"], "'nothing'"), ([], "got ''"), (["continuous"], "needs batching"), (["int8", "int4"], "name one")],
)
def test_what_cannot_be_dissected(techniques, said):
    with pytest.raises(ConfigError, match=said):
        ablate(None, None, techniques, name="a", repeats=1, all_subsets=False, on_run=print)


def test_the_command_writes_a_result_and_the_figure_has_a_bar_for_each(tmp_path, capsys, monkeypatch):
    from benchmarks import waterfall

    with pytest.raises(SystemExit) as ended:
        workload = "fixed:num_requests=3,input_tokens=9,output_tokens=3"
        asked = ["--techniques", "kv_cache,batching,int8", "--all-subsets", "--repeats", "1", "--out", str(tmp_path)]
        main(["bench", "ablate", "-m", "python-1m", "--workload", workload, *asked])
    assert ended.value.code == 0
    assert "sequential" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/*.json")
    report = json.loads(path.read_text())
    factors = [each["sequential"]["median"] for each in report["contributions"]]
    assert math.prod(factors) == pytest.approx(report["total"]["median"])
    assert math.prod(each["shapley"] for each in report["contributions"]) == pytest.approx(report["total"]["median"])
    waterfall.main([str(path), str(tmp_path / "out.svg")])
    svg = (tmp_path / "out.svg").read_text()
    assert svg.count("<rect") == 1 + len(factors) + 1  # behind all; the whole
    assert svg.count("<circle") == len(factors)  # Shapley
    for each in report["contributions"]:
        assert each["words"].split(",")[0] in svg
