"""Reports: JSON that reads back as it was, a path that never overwrites, and a table that shows the figures."""

import json
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from ridgeline.bench.facts import machine_facts, software_facts
from ridgeline.bench.load import Load
from ridgeline.bench.metrics import steady_state, summarize
from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.bench.report import (
    SCHEMA_VERSION,
    BenchReport,
    print_report,
    result_path,
    save_report,
    write_report,
)
from ridgeline.bench.workloads import describe_workload, parse_workload
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import parse_slos


def one_record(index, sent_s, error=None):
    return RequestRecord(
        index=index,
        arrival_s=sent_s,
        sent_s=sent_s,
        end_s=sent_s + 1.5,
        chunk_times_s=(sent_s + 0.5, sent_s + 1.0, sent_s + 1.5),
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=3,
        usage_reported=True,
        finish_reason="length",
        error=error,
    )


@pytest.fixture
def report():
    records = [one_record(at, at * 1.0) for at in range(4)] + [one_record(4, 4.0, error="HTTP 500: [red]boom")]
    log = RunLog(records=records, duration_s=5.5, unsent=0)
    return BenchReport(
        name="smoke",
        server="ridgeline",
        api="completions",
        model="tiny",
        workload=describe_workload(parse_workload("fixed:num_requests=5")),
        load=Load(schedule="poisson", request_rate_per_s=1.0),
        results=summarize(log, parse_slos("ttft:500 tpot:100")),
        steady_state=steady_state(log),
        requests=log.records,
    )


def test_a_written_report_reads_back_the_same(report, tmp_path):
    path = result_path(tmp_path, report)
    write_report(path, report)
    assert msgspec.json.decode(path.read_bytes(), type=BenchReport) == report
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no partial file is left
    plain = json.loads(path.read_text())
    assert plain["schema_version"] == SCHEMA_VERSION
    assert plain["results"]["latencies"]["ttft_ms"]["p99"] == 500.0
    assert plain["results"]["goodput"]["attainment_by_metric"] == {"ttft": 0.8, "tpot": 0.0}
    assert plain["workload"] == {
        "kind": "fixed",
        "options": {"num_requests": 5, "input_tokens": 512, "output_tokens": 128, "vocab_size": 512, "seed": 0},
        "sha256": None,
    }


def test_paths_name_hardware_day_and_run_and_never_overwrite(report, tmp_path):
    first = save_report(tmp_path, report)
    assert first == tmp_path / report.machine.slug / f"{report.created_utc[:10]}-smoke.json"
    second = save_report(tmp_path, report)
    assert second.name == f"{report.created_utc[:10]}-smoke-2.json"
    assert first.read_bytes() == second.read_bytes()


def test_unfit_files_are_one_clear_error(report, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(broken / "inside" / "x.json", report)


def test_the_table_shows_the_figures(report):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        print_report(console, report)
    text = console.export_text()
    for shown in ("4 / 1 / 0", "TTFT", "500.00", "TPOT", "ITL", "1500.00", "80.0%", "1 failed: HTTP 500: [red]boom"):
        assert shown in text


def test_facts_name_this_machine_and_software():
    machine, software = machine_facts(), software_facts()
    assert machine.cpu_model
    assert 1 <= machine.usable_cores <= machine.logical_cores
    assert machine.memory_bytes > 2**28
    assert software.python == ".".join(map(str, sys.version_info[:3]))
    assert software.ridgeline is not None
    named = machine_facts(accelerator="Some GPU (80 GB)")
    assert named.slug == f"some-gpu-80-gb-{named.usable_cores}c"


@pytest.mark.parametrize(
    ("features", "folder"),
    [
        ((), "intel-xeon-2c"),
        (("avx2",), "intel-xeon-avx2-2c"),
        (("avx2", "avx512f", "avx512_vnni"), "intel-xeon-avx512-2c"),
        (("avx2", "avx512f", "avx512_vnni", "avx512_bf16"), "intel-xeon-2c"),
        (("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"), "intel-xeon-avx-vnni-2c"),
        (("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"), "intel-xeon-amx-2c"),
    ],
)
def test_one_processor_name_has_a_folder_for_each_set_of_instructions(features, folder):
    machine = replace(machine_facts(), cpu_model="Intel(R) Xeon(R) Processor", cpu_features=features, usable_cores=2)
    assert machine.slug == folder
    assert replace(machine, accelerator="Some GPU").slug == "some-gpu-2c"


def test_the_client_side_imports_no_torch():
    code = "import sys, ridgeline.bench.report, ridgeline.bench.workloads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
