"""Each alert fires where it should and is quiet beside it, as Prometheus itself computes the rules; the board's queries
are queries.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
TTFT, LAG = "time_to_first_token_seconds_bucket", "event_loop_lag_seconds_bucket"
RESTARTS, FOUND, TRIED = "engine_restarts_total", 'doctor_finding{id="slots"', 'doctor_finding{id="a", severity="try"}'
MET, MISSED = (f'request_slo_total{{slo="ttft", met="{met}"}}' for met in ("true", "false"))
REJECTED, PRICED = "requests_rejected_total", "priced_step_seconds_total"
CALIBRATED = 'priced_step_predicted_seconds_total{provenance="calibrated"}'
ACCEPTED, DRAFTED = (f'spec_decode_num_{what}_tokens_total{{method="ngram"}}' for what in ("accepted", "draft"))
HITS, QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"
# (series where it fires, series where it does not): a sample a minute, as promtool writes them; the last decides
CASES = {
    "Down": ({"up": "0x10"}, {"up": "1x10"}),
    "EngineRestarted": ({f'{RESTARTS}{{cause="crash"}}': "0x5 1x4"}, {f'{RESTARTS}{{cause="crash"}}': "1x30"}),
    "EngineKeepsDying": (
        {f'{RESTARTS}{{cause="crash"}}': "0x5 1+1x4", f'{RESTARTS}{{cause="hang"}}': "0x5 1x4"},
        {f'{RESTARTS}{{cause="crash"}}': "0x5 1x4", f'{RESTARTS}{{cause="hang"}}': "0x9"},
    ),
    "ObjectiveMissedNow": ({MISSED: "0+8x70", MET: "0+2x70"}, {MISSED: "0+8x64 512x6", MET: "0+2x64 128+10x6"}),
    "ObjectiveMissed": ({MISSED: "0+4x400", MET: "0+6x400"}, {MISSED: "0+2x400", MET: "0+8x400"}),
    "PlanDrifts": ({"plan_drift_ratio": "1.2x30"}, {"plan_drift_ratio": "1.1x30"}),
    "DoctorFinds": ({f'{FOUND}, severity="FIX"}}': "2x5"}, {f'{FOUND}, severity="FIX"}}': "1.2x5", TRIED: "2x5"}),
    "KvRoundingCosts": ({"kv_canary_least_kl_bits": "0.06x5"}, {"kv_canary_least_kl_bits": "0.04x5"}),
    "ReadersSlow": ({"stream_stalls_total": "0+7x30"}, {"stream_stalls_total": "0+5x30"}),
    "PreemptionStorm": (
        {"prompt_tokens_recomputed_total": "0+6x30", "step_tokens_sum": "0+100x30"},
        {"prompt_tokens_recomputed_total": "0+4x30", "step_tokens_sum": "0+100x30"},
    ),
    "DraftsLose": ({"speculation_gain_ratio": "0.9x40"}, {"speculation_gain_ratio": "0.96x40"}),
    "EngineHung": ({"engine_hangs_total": "0x5 1x4"}, {"engine_hangs_total": "1x30"}),
    "EngineStuck": (
        {"num_requests_running": "1x30", "step_duration_seconds_count": "5x30"},
        {"num_requests_running": "1x30", "step_duration_seconds_count": "5+1x30"},
    ),
    "HeartbeatOld": ({"engine_heartbeat_age_seconds": "11x5"}, {"engine_heartbeat_age_seconds": "10x5"}),
    "InternalErrors": (
        {f'{REJECTED}{{reason="internal_error"}}': "0x5 1x2"},
        {f'{REJECTED}{{reason="invalid_request_error"}}': "0+5x8"},
    ),
    "Overloaded": (
        {f'{REJECTED}{{reason="server_is_overloaded"}}': "0+2x30", "request_success_total": "0+100x30"},
        {f'{REJECTED}{{reason="server_is_overloaded"}}': "0+2x30", "request_success_total": "0+300x30"},
    ),
    "KeysRefused": (
        {f'{REJECTED}{{reason="invalid_api_key"}}': "0+66x30"},
        {f'{REJECTED}{{reason="invalid_api_key"}}': "0+54x30"},
    ),
    "QueueLong": (
        {"num_requests_waiting": "9x30", "num_requests_running": "2x30"},
        {"num_requests_waiting": "8x30", "num_requests_running": "2x30"},
    ),
    "FirstTokenLate": (
        {f'{TTFT}{{le="10"}}': "0+90x30", f'{TTFT}{{le="30"}}': "0+100x30", f'{TTFT}{{le="+Inf"}}': "0+100x30"},
        {f'{TTFT}{{le="10"}}': "0+100x30", f'{TTFT}{{le="30"}}': "0+100x30", f'{TTFT}{{le="+Inf"}}': "0+100x30"},
    ),
    "CacheFull": ({"kv_cache_usage_perc": "0.96x30"}, {"kv_cache_usage_perc": "0.95x30"}),
    "Preemptions": ({"num_preemptions_total": "0+7x30"}, {"num_preemptions_total": "0+5x30"}),
    "PrefixHitsGone": (
        {QUERIES: "0+100x2000", HITS: "0+50x1800 90010+10x198"},
        {QUERIES: "0+100x2000", HITS: "0+50x1800 90040+40x198"},
    ),
    "StepsSlow": ({PRICED: "0+1.3x60", CALIBRATED: "0+1x60"}, {PRICED: "0+1.2x60", CALIBRATED: "0+1x60"}),
    "Throttled": ({"host_throttled_seconds_total": "0+4x30"}, {"host_throttled_seconds_total": "0+2x30"}),
    "CoreBusy": ({"host_run_delay_seconds_total": "0+4x30"}, {"host_run_delay_seconds_total": "0+2x30"}),
    "DraftsUseless": ({ACCEPTED: "0+5x90", DRAFTED: "0+100x90"}, {ACCEPTED: "0+20x90", DRAFTED: "0+100x90"}),
    "LoopLag": (
        {f'{LAG}{{le="0.1"}}': "0+90x30", f'{LAG}{{le="0.15"}}': "0+100x30", f'{LAG}{{le="+Inf"}}': "0+100x30"},
        {f'{LAG}{{le="0.1"}}': "0+100x30", f'{LAG}{{le="0.15"}}': "0+100x30", f'{LAG}{{le="+Inf"}}': "0+100x30"},
    ),
}
LABELS = {"InternalErrors": {"reason": "internal_error"}, "KeysRefused": {"reason": "invalid_api_key"}}
LABELS |= {alert: {"slo": "ttft"} for alert in ("ObjectiveMissedNow", "ObjectiveMissed")}
LABELS |= {"DoctorFinds": {"id": "slots"}}
LABELS |= {"DraftsUseless": {"method": "ngram"}, "Down": {"job": "ridgeline"}}


@pytest.fixture(scope="module")
def promtool() -> str:
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("NOT TESTED: deploy/ by promtool, for lack of it: apt-get install prometheus")
    return command


def series(name: str) -> str:
    """A selector with the label that a scrape adds."""
    if name == "up":
        return 'up{job="ridgeline", instance="one"}'
    bare, _, labels = name.partition("{")
    return f'ridgeline_{bare}{{instance="one", {labels}' if labels else f'ridgeline_{bare}{{instance="one"}}'


def minutes(values: str) -> int:
    """When the last of a series' samples is: `a+bxn` and `axn` are n + 1 of them."""
    return sum(int(part.rpartition("x")[2]) + 1 for part in values.split()) - 1


def case(alert: str, given: dict[str, str], *, fires: bool) -> dict[str, object]:
    """A test of promtool: an alert, and what it says, or that nothing is heard of it."""
    (rule,) = (rule for rule in RULES if rule["alert"] == f"Ridgeline{alert}")
    labels = {"instance": "one", **rule["labels"], **LABELS.get(alert, {})}
    summary = rule["annotations"]["summary"]
    for name, value in labels.items():
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    expected = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}] if fires else []
    at = f"{max(minutes(values) for values in given.values())}m"
    return {
        "interval": "1m",
        "input_series": [{"series": series(name), "values": values} for name, values in given.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": rule["alert"], "exp_alerts": expected}],
    }


def test_every_alert_has_its_cases():
    assert {rule["alert"] for rule in RULES} == {f"Ridgeline{alert}" for alert in CASES}
    assert all(
        (firing != quiet and set(firing) & set(quiet)) or alert == "InternalErrors"
        for alert, (firing, quiet) in CASES.items()
    )


def test_alerts_fire_where_they_should_and_nowhere_else(promtool: str, tmp_path: Path):
    tests = [case(alert, given, fires=not quiet) for alert, both in CASES.items() for quiet, given in enumerate(both)]
    wrong = [
        case("CacheFull", CASES["CacheFull"][1], fires=True),
        case("CacheFull", CASES["CacheFull"][0], fires=False),
    ]
    for name, chosen in (("right", tests), *((f"wrong{i}", [each]) for i, each in enumerate(wrong))):
        file = {"rule_files": [str(DEPLOY / "alerts.yaml")], "evaluation_interval": "1m", "tests": chosen}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(file))
        done = subprocess.run([promtool, "test", "rules", f"{name}.yaml"], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode == 0) == (name == "right"), done.stdout + done.stderr


def test_prometheus_can_read_the_rules_and_the_boards_queries(promtool: str, tmp_path: Path):
    board = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 40
    records = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries)
    ]
    (tmp_path / "board.yaml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": records}]}))
    for rules in (DEPLOY / "alerts.yaml", tmp_path / "board.yaml"):
        done = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
