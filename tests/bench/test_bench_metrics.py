"""The metrics, against numbers worked out by hand from the definitions."""

import math

import numpy as np
import pytest

from ridgeline.bench.metrics import steady_state, summarize
from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.core.slo import parse_slos


def record(
    index, sent_s, chunk_times_s, *, output_tokens=None, prompt_tokens=10, end_s=None, error=None, arrival_s=None
):
    return RequestRecord(
        index=index,
        arrival_s=sent_s if arrival_s is None else arrival_s,
        sent_s=sent_s,
        end_s=chunk_times_s[-1] if end_s is None else end_s,
        chunk_times_s=tuple(chunk_times_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=4,
        output_tokens=len(chunk_times_s) if output_tokens is None else output_tokens,
        usage_reported=True,
        finish_reason="length",
        error=error,
    )


def run_of(*records, duration_s=None, unsent=0):
    return RunLog(records=list(records), duration_s=duration_s or max(one.end_s for one in records), unsent=unsent)


# Two requests of three tokens: chunks at 1.0 1.5 2.5 after sending at 0, and at 2.25 2.5 3.0 after sending at 2.
THREE = run_of(record(0, 0.0, [1.0, 1.5, 2.5]), record(1, 2.0, [2.25, 2.5, 3.0]), duration_s=4.0)


def test_latencies_by_hand():
    found = summarize(THREE).latencies
    assert (found.ttft_ms.mean, found.ttft_ms.p50, found.ttft_ms.max) == (625.0, 625.0, 1000.0)
    # (2.5 - 1.0) / 2 = 0.75 s and (1.0 - 0.25) / 2 = 0.375 s
    assert (found.tpot_ms.mean, found.tpot_ms.max) == (562.5, 750.0)
    # gaps 500, 1000, 250, 500
    assert (found.itl_ms.count, found.itl_ms.mean, found.itl_ms.p50) == (4, 562.5, 500.0)
    assert found.itl_ms.std == pytest.approx(math.sqrt((62.5**2 * 2 + 437.5**2 + 312.5**2) / 4))
    assert (found.e2el_ms.mean, found.e2el_ms.max) == (1750.0, 2500.0)


def test_percentiles_interpolate_linearly():
    log = run_of(*(record(index, 0.0, [index / 1000]) for index in range(101)), duration_s=1.0)
    ttft = summarize(log).latencies.ttft_ms
    assert [ttft.p50, ttft.p90, ttft.p99] == pytest.approx([50.0, 90.0, 99.0])
    two = summarize(run_of(record(0, 0.0, [1.0]), record(1, 0.0, [2.0]))).latencies.ttft_ms
    assert [two.p50, two.p90, two.p99] == pytest.approx([1500.0, 1900.0, 1990.0])


def test_throughputs_divide_by_the_whole_run():
    found = summarize(THREE)
    assert (found.completed, found.prompt_tokens, found.output_tokens, found.cached_prompt_tokens) == (2, 20, 6, 8)
    assert found.request_throughput_per_s == 0.5
    assert found.output_throughput_tok_per_s == 1.5
    assert found.total_throughput_tok_per_s == 6.5


def test_tpot_divides_by_tokens_not_by_chunks():
    # speculation: five tokens came in two chunks
    found = summarize(run_of(record(0, 0.0, [1.0, 3.0], output_tokens=5))).latencies
    assert found.tpot_ms.mean == 500.0
    assert found.itl_ms.mean == 2000.0


def test_the_closing_chunk_is_part_of_the_latency_but_not_a_gap():
    found = summarize(run_of(record(0, 0.0, [1.0, 2.0], end_s=2.5))).latencies
    assert (found.e2el_ms.mean, found.tpot_ms.mean, found.itl_ms.count) == (2500.0, 1500.0, 1)


def test_one_token_has_no_tpot_and_meets_any():
    log = run_of(record(0, 0.0, [1.0]))
    found = summarize(log, parse_slos("tpot:1"))
    assert found.latencies.tpot_ms is None
    assert found.latencies.itl_ms is None
    assert found.goodput.good_requests == 1


def test_failures_are_counted_and_kept_out_of_the_latencies():
    broken = [record(index, 0.0, [0.1, 9.0], error="HTTP 500: boom") for index in (2, 3)]
    found = summarize(run_of(*THREE.records, *broken, record(4, 0.0, [0.1], error="no end"), duration_s=4.0, unsent=7))
    assert (found.completed, found.failed, found.unsent) == (2, 3, 7)
    assert found.errors == {"HTTP 500: boom": 2, "no end": 1}
    assert found.latencies == summarize(THREE).latencies
    assert found.output_tokens == 6


def test_nothing_succeeded():
    found = summarize(run_of(record(0, 0.0, [], end_s=1.0, error="HTTP 503: full")), parse_slos("ttft:10"))
    assert found.latencies.ttft_ms is None
    assert found.request_throughput_per_s == 0.0
    assert found.goodput.attainment == 0.0
    assert summarize(RunLog(records=[], duration_s=0.0, unsent=3)).peak_concurrency == 0


def test_goodput_needs_every_objective_and_attainment_counts_failures():
    # request 0: ttft 1000, tpot 750, e2el 2500; request 1: ttft 250, tpot 375, e2el 1000; request 2 failed
    log = run_of(*THREE.records, record(2, 0.0, [0.1, 0.2], error="HTTP 500: x"), duration_s=4.0)
    goodput = summarize(log, parse_slos("ttft:1000 tpot:500 e2el:3000")).goodput
    assert goodput.good_requests == 1
    assert goodput.requests_per_s == 0.25
    assert goodput.attainment == pytest.approx(1 / 3)
    assert goodput.attainment_by_metric == pytest.approx({"ttft": 2 / 3, "tpot": 1 / 3, "e2el": 2 / 3})
    assert summarize(log).goodput is None


def test_peak_concurrency_does_not_overlap_neighbours():
    back_to_back = run_of(record(0, 0.0, [1.0]), record(1, 1.0, [2.0]), record(2, 1.5, [3.0]))
    assert summarize(back_to_back).peak_concurrency == 2


def test_send_delay():
    delay = summarize(run_of(record(0, 0.5, [1.0], arrival_s=0.25))).send_delay_ms
    assert delay.max == 250.0


def test_steady_state_by_hand():
    # First completion at 2, last sending at 6. Four tokens per request, one chunk a second.
    log = run_of(
        record(0, 0.0, [0.5, 1.0, 1.5, 2.0]),
        record(1, 1.0, [1.5, 2.5, 3.5, 4.5], prompt_tokens=100),
        record(2, 2.0, [3.0, 4.0, 5.0, 6.0], prompt_tokens=40),
        record(3, 5.0, [5.5, 6.5, 7.5, 8.5], prompt_tokens=20),
        record(4, 6.0, [7.0, 8.0, 9.0, 10.0]),
        record(5, 3.0, [], end_s=4.0, error="HTTP 500: x"),
    )
    found = steady_state(log)
    assert (found.start_s, found.end_s) == (2.0, 6.0)
    assert found.completed == 2  # 1 and 2; the completion that opens the window is outside
    assert found.request_throughput_per_s == 0.5
    assert found.prompt_throughput_tok_per_s == (40 + 20) / 4  # sent inside: 2 and 3
    assert found.output_throughput_tok_per_s == (3 + 4 + 1) / 4
    assert found.mean_concurrency == (2.5 + 4 + 1 + 1) / 4
    assert found.latencies.ttft_ms.mean == 750.0


def test_a_burst_has_no_steady_state():
    assert steady_state(run_of(record(0, 0.0, [1.0]), record(1, 0.0, [2.0]))) is None
    assert steady_state(run_of(record(0, 0.0, [], end_s=1.0, error="x"))) is None


def test_a_random_moment_falls_into_long_gaps_more_often():
    gaps_s = [0.001] * 90 + [0.1] * 10
    found = summarize(RunLog(records=[record(0, 0.0, np.cumsum([1.0, *gaps_s]).tolist())], duration_s=3.0, unsent=0))
    moments_s = np.random.default_rng(0).uniform(0, sum(gaps_s), 100_000)
    met_s = np.array(gaps_s)[np.searchsorted(np.cumsum(gaps_s), moments_s)]
    assert found.latencies.itl_ms.mean_over_time == pytest.approx(1e3 * met_s.mean(), rel=0.01)
