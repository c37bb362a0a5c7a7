"""Objectives are read in one place, for all that takes them."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo, parse_slos


@pytest.mark.parametrize(
    "text",
    [
        "ttft:500 tpot:50",
        "ttft=500ms,tpot=50ms",
        "ttft=0.5s,tpot=.05s",
        "ttft=5e2, tpot=50.0ms",
        " ttft:500ms tpot=50 ",
    ],
)
def test_one_objective_may_be_written_in_several_ways(text: str) -> None:
    assert parse_slos(text) == (Slo(metric="ttft", limit_ms=500.0), Slo(metric="tpot", limit_ms=50.0))


def test_there_may_be_none_and_all_three() -> None:
    assert parse_slos("") == ()
    assert [slo.metric for slo in parse_slos("e2el=2s,tpot=1,ttft=3")] == ["e2el", "tpot", "ttft"]


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "ttft",
            "itl:5",
            "ttft:-1",
            "ttft:0",
            "ttft:nan",
            "tpot:inf",
            "ttft=1e999",
            "tpot=5m",
            "ttft=5 ms",
            "ttft==5",
        ),
        *("ttft:1 ttft=2ms", "TTFT=5", "ttft=٥", "x" * 5000),
    ],
)
def test_what_is_none_is_refused_in_one_line(bad: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_slos(bad)
    message = str(refused.value)
    assert message.startswith("objective ") and "\n" not in message and len(message) < 150
