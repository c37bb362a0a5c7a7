"""The one list of metrics, `metrics.toml`, as far as the server needs it; tools make docs, board and alerts of it."""

import tomllib
from importlib import resources
from typing import Literal

import msgspec

PREFIX = "ridgeline_"


class MetricName(msgspec.Struct, frozen=True):
    """One metric, as metrics.toml says."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    read: str = ""
    labels: tuple[str, ...] = ()
    buckets: str = ""
    vllm: str = ""


class MetricList(msgspec.Struct, frozen=True):
    """Hold what the file says."""

    buckets: dict[str, tuple[float, ...]]
    metric: dict[str, MetricName]


_FILE = msgspec.convert(
    tomllib.loads((resources.files("ridgeline.server") / "metrics.toml").read_text("utf-8")), MetricList
)
METRICS, BUCKETS = _FILE.metric, _FILE.buckets
