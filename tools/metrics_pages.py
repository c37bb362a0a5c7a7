"""Write what is made of the list of metrics: docs/metrics.md, and in deploy/ the alerts and the Grafana board.

Usage: python tools/metrics_pages.py [--write]. Without --write it prints the page; tests hold all files to the list.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from ridgeline.server import metric_names
from ridgeline.server.metric_names import BUCKETS, PREFIX

REPO = Path(__file__).parents[1]
LIST = Path(metric_names.__file__).with_name("metrics.toml")
PAGE, RULES, BOARD = REPO / "docs/metrics.md", REPO / "deploy/alerts.yaml", REPO / "deploy/grafana.json"
GUIDE = REPO / "docs/howto/deploy.md"
BEGIN, END = "<!-- alerts: python tools/metrics_pages.py --write -->\n", "<!-- end of alerts -->\n"
ROWS = (
    *("Load", "Latency", "Objectives", "Queue and KV cache", "Steps", "Roofline", "Speculation"),
    *("Requests", "Machine", "Errors"),
)
UNITS = {"seconds": "s", "bytes": "B", "tokens": "tokens", "hertz": "Hz", "joules": "J", "ratio": "", "flops": "FLOP"}
GRAFANA_UNITS = {"seconds": "s", "bytes": "bytes", "hertz": "hertz"}
PANEL_UNITS = {  # where it is not that of the metric's name
    "Objectives/Requests that meet one, share": "percentunit",
    "Queue and KV cache/Tokens computed again, share": "percentunit",
    "Queue and KV cache/KV cache usage": "percentunit",
    "Queue and KV cache/Prefix cache, share found": "percentunit",
    "Speculation/Drafted tokens accepted, share": "percentunit",
    "Steps/Time by kind of op, share": "percentunit",
    "Roofline/FLOP per second": "flops",
    "Roofline/Bytes per second, below the ceilings": "Bps",
    "Machine/Power": "watt",
}
HEIGHT, WIDTH, ACROSS = 8, 8, 3  # of a panel, in Grafana's 24 columns


class Alert(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to wake an operator, and what to do then."""

    name: str
    expr: str
    severity: Literal["page", "ticket"]
    summary: str
    fix: str
    hold: str = ""  # how long it must be so


class Metric(metric_names.MetricName, frozen=True, forbid_unknown_fields=True):
    """One metric with all that the list says of it."""

    when: str = ""
    panel: str = ""
    query: str = ""
    alert: tuple[Alert, ...] = ()


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    buckets: dict[str, tuple[float, ...]]
    metric: dict[str, Metric]


def metrics() -> Mapping[str, Metric]:
    """Return the whole list."""
    return msgspec.convert(tomllib.loads(LIST.read_text()), _List).metric


def shown(name: str, metric: Metric) -> str:
    """Return the name of a metric as Prometheus has it."""
    return f"{PREFIX}{name}_total" if metric.kind == "counter" else PREFIX + name


def unit(name: str) -> str:
    """Return the unit that a name ends with, or that is its word for it; empty where it is a number."""
    return next((unit for word in reversed(name.split("_")) for known, unit in UNITS.items() if word == known), "")


def page() -> str:
    """Return `docs/metrics.md`."""
    buckets = "\n".join(
        f"- {', '.join(f'`{PREFIX}{name}`' for name, metric in metrics().items() if metric.buckets == key)}: "
        + ", ".join(f"{bound:g}" for bound in bounds)
        for key, bounds in BUCKETS.items()
    )
    return f"""# Metrics

<!-- written by: python tools/metrics_pages.py --write -->

What `GET /metrics` shows, in Prometheus' text format. `deploy/alerts.yaml` and the Grafana board \
`deploy/grafana.json` are made of the same list, `src/ridgeline/server/metrics.toml`; [how to use \
them](howto/deploy.md#watch-it).

Three kinds of time stand beside each other and are never mixed: the *limit*, which the machine's measured ceilings \
allow, the *predicted* time, and the *measured* one; all three are known of one step a second. What is unknown is \
not shown: a metric that is missing is not 0.

The server counts: it sums the engine's journal, which comes four times a second. The engine's loop does nothing for \
it; beside it, its process prices one step a second. Labels have few values: no name, no key and no address of a \
client is one. Names of adapters are, in one metric, as gateways for vLLM read them.

With `--metrics-compat vllm` the metrics with a name in the last column are shown under it as well, with the labels \
`model_name` and `engine`, as boards, gateways and autoscalers for vLLM expect them. Where vLLM has no label \
`method`, ours stays, and so do the reasons of `num_requests_waiting_by_reason`: all but `together` are its \
`capacity`. Its `prompt_tokens_recomputed` is not shown: it counts cached tokens that are computed for the last one's \
sake, ours what preempted sequences lost.

Nothing is probed while requests are served: `{PREFIX}machine_speed_ratio` is what steps say of the ceiling that \
bounds them, and a ceiling that bounds none is not told. The doctor does not run by itself, since it takes a core for \
seconds; with `--api-key-file` it cannot be asked over HTTP, and `{PREFIX}doctor_finding` is not there.

| metric | kind | unit | labels | what it says | as in vLLM |
|---|---|---|---|---|---|
{"".join(_line(name, metric) for name, metric in metrics().items())}
`process_…` is the server's process, `ridgeline_engine_process_…` the engine's, where it has one of its own: \
`cpu_seconds_total`, `resident_memory_bytes`, `virtual_memory_bytes`, `start_time_seconds`, `open_fds`, `max_fds`.

A request of a quarantine is `{PREFIX}requests_rejected_total{{reason="request_quarantined"}}`; all reasons are \
codes of errors. The share of the host in a step is that of the parts other than `model` in \
`{PREFIX}step_seconds_total`.

## Buckets

{buckets}
"""


def _line(name: str, metric: Metric) -> str:
    text = metric.text.rstrip(".") + (f"; there where {metric.when}" if metric.when else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    alias = f"`vllm:{metric.vllm}`" if metric.vllm else ""
    return f"| `{shown(name, metric)}` | {metric.kind} | {unit(name)} | {labels} | {text} | {alias} |\n"


def alerts() -> Iterator[Alert]:
    """Yield all alerts."""
    for metric in metrics().values():
        yield from metric.alert


def rules() -> str:
    """Return `deploy/alerts.yaml`."""
    made = [
        {
            "alert": f"Ridgeline{alert.name}",
            "expr": alert.expr,
            **({"for": alert.hold} if alert.hold else {}),
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in alerts()
    ]
    text = yaml.safe_dump({"groups": [{"name": "ridgeline", "rules": made}]}, sort_keys=False, width=120)
    return (
        "# Prometheus alerting rules; what to do is under each one's name in docs/howto/deploy.md.\n"
        f"# Written by: python tools/metrics_pages.py --write\n{text}"
    )


def guide() -> str:
    """Return `docs/howto/deploy.md` with the table of the alerts as it should be."""
    head, _, rest = GUIDE.read_text().partition(BEGIN)
    lines = "".join(f"| `Ridgeline{alert.name}` | {alert.fix} |\n" for alert in alerts())
    return f"{head}{BEGIN}| alert | what to do |\n|---|---|\n{lines}{END}{rest.partition(END)[2]}"


def board() -> str:
    """Return `deploy/grafana.json`: a row of panels for each of ROWS, each with the metrics that name it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        titles = dict.fromkeys(m.panel.partition("/")[2] for m in metrics().values() if m.panel.startswith(f"{row}/"))
        panels.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "collapsed": False})
        for number, title in enumerate(titles):
            place = {"x": number % ACROSS * WIDTH, "y": y + 1 + number // ACROSS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(f"{row}/{title}", title, place))
        y += 1 + -(-len(titles) // ACROSS) * HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    instance = {
        "name": "instance", "label": "Instance", "type": "query", "datasource": _source(), "refresh": 2,
        "query": f"label_values({PREFIX}build_info, instance)", "includeAll": True, "multi": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    made = {
        "title": "Ridgeline", "uid": "ridgeline", "tags": ["ridgeline"], "schemaVersion": 39, "editable": True,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "templating": {"list": [source, instance]}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panel(place_name: str, title: str, place: Mapping[str, int]) -> dict[str, Any]:
    here = {name: metric for name, metric in metrics().items() if metric.panel == place_name}
    targets = [target for name, metric in here.items() for target in _targets(name, metric, alone=len(here) == 1)]
    for letter, target in zip("ABCDEFGHIJ", targets):
        target |= {"refId": letter, "datasource": _source()}
    name, metric = next(iter(here.items()))
    is_share = metric.kind == "counter" and name.endswith("seconds")  # of the time
    known = "percentunit" if is_share else GRAFANA_UNITS.get(name.split("_")[-1], "short")
    text = " ".join(dict.fromkeys(metric.text for metric in here.values()))
    return {
        "type": "timeseries", "title": title, "description": text, "datasource": _source(), "gridPos": dict(place),
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": PANEL_UNITS.get(place_name, known), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }  # fmt: skip


def _targets(name: str, metric: Metric, *, alone: bool) -> Iterator[dict[str, Any]]:
    """Yield the queries of a metric: as the list says, the rate of a counter, quantiles, or the value."""
    full, word = shown(name, metric), name.replace("_", " ")
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or word
    if metric.kind == "histogram" and not metric.query:
        for quantile in (0.5, 0.9, 0.99):
            expr = f"histogram_quantile({quantile}, sum by (le) (rate({full}_bucket[$__rate_interval])))"
            yield {
                "expr": _of_instance(expr),
                "legendFormat": f"p{quantile * 100:g}" if alone else f"{word} p{quantile * 100:g}",
            }
        return
    by = f"sum by ({', '.join(metric.labels)}) " if metric.labels else "sum"
    plain = f"{by}(rate({full}[$__rate_interval]))" if metric.kind == "counter" else f"{full}"
    yield {
        "expr": _of_instance(metric.query or plain),
        "legendFormat": legend if metric.kind == "counter" or metric.labels else f"{word} {{{{instance}}}}",
    }


def _of_instance(expr: str) -> str:
    """Return a query for the instances that are chosen in the board."""
    chosen = re.sub(rf"\b({PREFIX}\w+)\b(?!\{{)", r'\1{instance=~"$instance"}', expr)
    return re.sub(rf"\b({PREFIX}\w+)\{{(?!instance)", r'\1{instance=~"$instance", ', chosen)


def files() -> Mapping[Path, str]:
    """Return all files as they should be."""
    return {PAGE: page(), RULES: rules(), BOARD: board(), GUIDE: guide()}


def main() -> None:
    """Print the page, or write all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(page(), end="")
        return
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
