"""`benchmarks/perplexity.py`: formats and methods on one text, and GGUF files as what their numbers mean."""

import json
import sys

import pytest
from benchmarks import perplexity

from ridgeline.backends.probe import find_native
from ridgeline.cli import main as command
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

pytestmark = pytest.mark.skipif(find_native().module is None, reason="the native module is not built")
TEXT = "def read(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n"


def measured(tmp_path, monkeypatch, *more: str) -> dict:
    text, calibration = tmp_path / "held.py", tmp_path / "seen.py"
    text.write_text(TEXT * 20)
    calibration.write_text("class A:\n    def f(self, x):\n        return {x: self.f(x + 1)}\n" * 60)
    shared = ["--text", str(text), "--calibration", str(calibration), "--window", "64", "--tokens", "300"]
    arguments = ["perplexity.py", *shared, "--samples", "2", "--threads", "1", "--out", str(tmp_path / "out"), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    perplexity.main()
    (path,) = (tmp_path / "out").rglob("*.json")
    return {each["name"]: each for each in json.loads(path.read_text())["formats"]}


def test_methods_beside_formats(tmp_path, monkeypatch):
    chosen = ("--formats", "bfloat16", "int4 g64", "--methods", "rtn", "llm-int8", "--group-size", "64")
    found = measured(tmp_path, monkeypatch, "--model", "python-1m", *chosen)
    assert list(found) == ["float32", "bfloat16", "int4 g64", "rtn", "llm-int8", "rtn inputs 8", "llm-int8 inputs 8"]
    kl = {name: each["comparison"]["kl"]["mean"] for name, each in found.items()}
    assert kl["float32"] == 0 < kl["bfloat16"] < kl["llm-int8"] < kl["llm-int8 inputs 8"] < kl["rtn"] < kl["int4 g64"]
    assert found["float32"]["bits"] == 32 and found["bfloat16"]["bits"] == pytest.approx(16, rel=0.01)
    assert 4.25 < found["int4 g64"]["bits"] < found["rtn"]["bits"] < found["llm-int8"]["bits"] < 16
    assert found["rtn"]["comparison"]["num_documents"] > 1 and found["rtn"]["comparison"]["kl"]["standard_error"] > 0


def test_a_file_counts_as_what_its_numbers_mean(tmp_path):
    """The folder of a file, in float32, has the file's own numbers; of a folder there is none."""
    assert perplexity.decoded("python-1m", tmp_path) == "python-1m"
    with pytest.raises(SystemExit):
        command(["quantize", "python-1m", "--method=rtn", "--group-size=32", "--format=gguf", "--eval-tokens=0",
                 "--num-threads=1", f"--out={tmp_path / 'small.gguf'}"])  # fmt: skip
    folder = ModelFolder.open(perplexity.decoded(str(tmp_path / "small.gguf"), tmp_path))
    assert folder.config["dtype"] == "bfloat16" and folder.gguf is None
    spec = read_spec(folder.config)
    program = lower(spec)
    decoded = load_weights(folder, spec, program, FLOAT32)
    file = load_weights(ModelFolder.open(tmp_path / "small.gguf"), spec, program, FLOAT32)
    assert all((decoded[name] == file[name]).all() for name in program.weights)
