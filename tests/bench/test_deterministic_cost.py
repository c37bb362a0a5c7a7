"""The price of the deterministic mode: ratios of pairs, and the command on a bundled model."""

import json

import pytest
from benchmarks import deterministic
from benchmarks.peers.workload import Cell

pytest.importorskip("ridgeline._native", reason="the native code is not built")


def test_ratios_belong_to_pairs():
    cell = Cell(name="decode_b1", kind="decode", input_tokens=16, output_tokens=32)
    found = deterministic.cost(cell, free=[100.0, 50.0, 80.0], deterministic=[90.0, 50.0, 40.0])
    assert found.ratios == [0.9, 1.0, 0.5]
    assert (found.median_ratio, found.min_ratio, found.max_ratio) == (0.9, 0.5, 1.0)
    with pytest.raises(ValueError):
        deterministic.cost(cell, free=[1.0, 2.0], deterministic=[1.0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            '{"max_model_len": 64, "quantize": "int8", "deterministic": true}',
            "deterministic, max_model_len: set by the",
        ),
        ('["int8"]', "must be a JSON object"),
    ],
)
def test_options_of_the_benchmark_itself_are_refused(capsys, options, words):
    with pytest.raises(SystemExit):
        deterministic.main(["--model=python-1m", f"--options={options}"])
    assert words in capsys.readouterr().err


def test_a_bundled_model_is_measured_where_its_context_has_room(tmp_path):
    """No decode cell: on a busy machine a few tokens may take longer than many."""
    options = ["--cells", "prefill_512", "decode_b1_4k", "--shrink=2", "--pairs=2", "--threads=1"]
    deterministic.main(["--model=python-1m", *options, f"--out={tmp_path}"])
    (path,) = tmp_path.glob("*/*-deterministic.json")
    report = json.loads(path.read_text())
    (prefill,) = report["cells"]
    assert prefill["cell"]["input_tokens"] == 256
    assert len(prefill["ratios"]) == len(prefill["free"]) == 2
    assert all(rate > 0 for rate in prefill["free"] + prefill["deterministic"])
