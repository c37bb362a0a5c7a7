"""The script that compares with transformers, on a tiny shape, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "vs_transformers.py"


def test_pairs_are_counted_and_agree(tmp_path):
    options = {"shape": "tiny", "pairs": 2, "requests": 3, "input-tokens": 16, "output-tokens": 4, "threads": 1}
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path}", *(f"--{key}={options[key]}" for key in options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pair 2" in done.stdout and "median" in done.stdout
    (path,) = tmp_path.glob("*/*-vs-transformers-tiny.json")
    report = json.loads(path.read_text())
    assert len(report["pairs"]) == 2
    for pair in report["pairs"]:
        assert abs(pair["ratio"] - pair["ridgeline_tok_per_s"] / pair["transformers_tok_per_s"]) < 1e-9
        assert pair["equal_first_tokens"] == 3  # one position of a two-layer model: no room for rounding to differ
    assert all(rate > 0 for rate in report["read_bandwidth_gb_per_s"])
    assert report["min_ratio"] <= report["median_ratio"] <= report["max_ratio"]
