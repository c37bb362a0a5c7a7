"""The soak for some seconds: everything is asked for, one engine is killed, nothing stays taken and nothing changes."""

import argparse

from benchmarks import soak
from benchmarks.soak_clients import Clients


def test_a_short_soak_finds_nothing() -> None:
    options = argparse.Namespace(model="python-1m", minutes=0.12, clients=6, kill_every=5.0, threads=1, speculate="off")
    report = soak.measure(options)
    assert report.problems == []
    assert report.num_kills == report.pauses[-1].num_restarts == 1
    assert {"fixed", "hangs_up", "tools", "schema", "slow", "bad", "adapted", "batch"} <= report.requests.keys()


def test_a_changed_token_and_a_taken_block_are_problems() -> None:
    found = Clients(port=0)
    found.num_ended = 3
    soak.compare(found, {'ridgeline_request_success_total{finished_reason="stop"}': 2.0})
    found.told("/v1/completions", 500, {"error": {}})
    assert len(found.problems) == 2
