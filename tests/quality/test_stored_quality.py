"""What was measured of a model is stored beside it, shown, and decides whether its inputs are rounded to 8 bits."""

import json

import pytest
from benchmarks.input_bits import planted

from ridgeline import LLM
from ridgeline.cli import main
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
from ridgeline.weights.quality import QUALITY_FILE, read_quality
from ridgeline.weights.save import copy_beside, save_weights

TEXT = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield name\n"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code, capsys.readouterr().err
    return capsys.readouterr().out


def inputs_of(model, **options):
    return LLM(str(model), num_threads=1, **options).engine.info.choices["quantize_inputs"]


@pytest.fixture
def model(tmp_path, request):
    """python-1m, maybe the same function with a few channels 64 to 128 times as large."""
    source, out = ModelFolder.open("python-1m"), tmp_path / "model"
    out.mkdir()
    copy_beside(source.path, out, QUALITY_FILE)
    spec = read_spec(source.config)
    weights = load_weights(source, spec, lower(spec), FLOAT32)
    save_weights(out, spec, planted(lower(spec), weights) if request.param else weights, FLOAT32)
    return out


@pytest.mark.parametrize(("model", "inputs"), [(True, "int16"), (False, "int8")], indirect=["model"])
def test_planted_outliers_get_inputs_of_16_bits(model, inputs, backend, tmp_path, capsys):
    text = tmp_path / "text.py"
    text.write_text(TEXT * 40)
    assert inputs_of(model, backend=backend, quantize="int8").value == "int8"  # nothing is known of it
    run(capsys, "evaluate", model, "--quantize=int8", "--store", "--text", text, "--tokens=1500", "--num-threads=1")
    chosen = inputs_of(model, backend=backend, quantize="int8")
    assert chosen.value == inputs and "measured to cost" in chosen.reason
    asked = inputs_of(model, backend=backend, quantize="int8", quantize_inputs="int8")
    assert (asked.value, asked.reason) == ("int8", "as asked")
    assert inputs_of(model, backend=backend, quantize="int4").value == "int8"  # that was not measured
    cost = json.loads((model / QUALITY_FILE).read_text())["inputs"]["int8"]
    assert (cost["mean"] > 0.05) == (inputs == "int16")


@pytest.mark.parametrize(
    ("mean", "error", "inputs"),
    [(0.04, 0.001, "int8"), (0.04, 0.01, "int16"), (0.04, None, "int8"), (0.06, None, "int16"), (1e999, None, "int16")],
)
def test_the_upper_end_of_the_interval_decides(mean, error, inputs, tmp_path):
    (tmp_path / "model").mkdir()
    copy_beside(ModelFolder.open("python-1m").path, tmp_path / "model")
    found = {"inputs": {"int8": {"mean": mean, "standard_error": error}}}
    (tmp_path / "model" / QUALITY_FILE).write_text(json.dumps(found))
    for path in ModelFolder.open("python-1m").path.glob("*.safetensors"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    assert inputs_of(tmp_path / "model", quantize="int8").value == inputs


def test_a_folder_shows_its_quality(tmp_path, capsys, caplog):
    out = tmp_path / "out"
    for name in "abc":
        (tmp_path / name).write_text(f"# {name}\n" + TEXT * (40 if name == "a" else 5))
    measure = ("--text", tmp_path / "a", "--eval-text", tmp_path / "b", "--eval-text", tmp_path / "c")
    run(capsys, "quantize", "python-1m", "--method=rtn", "--out", out, *measure, "--num-threads=1")
    document = json.loads((out / QUALITY_FILE).read_text())
    kl = document["comparison"]["kl"]
    shown, tokens = (
        f"KL {kl['mean']:.4f} ± {kl['standard_error']:.4f} bits per token",
        document["comparison"]["num_tokens"],
    )
    assert f"measured quality: {shown} to python-1m, of {tokens} tokens" in run(capsys, "inspect", out)
    assert json.loads(run(capsys, "inspect", out, "--json"))["quality"]["value"] == shown
    with caplog.at_level("INFO", "ridgeline"):
        llm = LLM(str(out), num_threads=1)
    assert llm.engine.info.choices["quality"].value == shown
    assert f"quality: {shown} (to python-1m, of {tokens} tokens)" in caplog.text
    assert document["inputs"]["as stored"]["mean"] > 0
    assert "measured to cost" in llm.engine.info.choices["quantize_inputs"].reason


@pytest.mark.parametrize(
    "text", ["{", '{"inputs": 3}', '{"comparison": {"kl": {"mean": "x"}}}', '{"inputs": {"int8": {}}}']
)
def test_a_broken_measurement_is_named(text, tmp_path):
    (tmp_path / QUALITY_FILE).write_text(text)
    with pytest.raises(ModelLoadError, match=QUALITY_FILE):
        read_quality(tmp_path)


def test_of_a_file_it_lies_beside(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert read_quality(path).inputs == {}
    (tmp_path / f"model.gguf.{QUALITY_FILE}").write_text('{"inputs": {"as stored": {"mean": 0.2}}}')
    assert read_quality(path).inputs["as stored"].mean == 0.2
