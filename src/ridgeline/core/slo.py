"""Service level objectives: what a request's latency may be at most. Read here for every command and the server."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ridgeline.core.errors import ConfigError

SloMetric = Literal["ttft", "tpot", "e2el"]
_OBJECTIVE = re.compile(r"(ttft|tpot|e2el)[:=](\d+\.?\d*(?:e\d+)?|\.\d+)(ms|s)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """One objective: a request's metric is at most `limit_ms`. TPOT of a single token counts as 0, as in vLLM."""

    metric: SloMetric
    limit_ms: float


def parse_slos(text: str) -> tuple[Slo, ...]:
    """Read objectives such as `ttft=500ms,tpot=50ms` or `ttft:500 tpot:50`; a plain number is of milliseconds.

    Raises ConfigError for one that is unknown or repeated.
    """
    slos: list[Slo] = []
    for each in text.replace(",", " ").split():
        found = _OBJECTIVE.fullmatch(each)
        limit_ms = 0.0 if found is None else float(found[2]) * (1000 if found[3] == "s" else 1)
        if found is None or not 0 < limit_ms < float("inf"):
            names = ", ".join(get_args(SloMetric))
            raise ConfigError(f"objective {each[:40]!r} must be one of {names} with a time, like ttft=500ms")
        metric = next(known for known in get_args(SloMetric) if known == found[1])
        if any(slo.metric == metric for slo in slos):
            raise ConfigError(f"objective {metric} is given twice")
        slos.append(Slo(metric=metric, limit_ms=limit_ms))
    return tuple(slos)
