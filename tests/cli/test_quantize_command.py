"""`ridgeline quantize`: a folder that runs, its measurement, and what is refused."""

import json
import os
import shutil
import signal
import sys
import time

import pytest

from children import Child
from ridgeline.weights.folder import ModelFolder

PATIENCE_S = 120.0


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "calibration.py"
    path.write_text("import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield name\n" * 20)
    return path


def options(text, out):
    return ("--text", text, "--out", out, "--length=32", "--samples=4", "--eval-tokens=200", "--num-threads=1")


def test_a_folder_that_runs_with_its_measurement(ridgeline, text, tmp_path):
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    out = tmp_path / "out"
    done = ridgeline("quantize", "python-1m", "--method=gptq", *options(text, out))
    assert done.code == 0, done.err
    assert "KL, bits per token" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.py", "out"]
    assert {"tokenizer.json", "generation_config.json", "config.json"} <= {path.name for path in out.iterdir()}
    quality = json.loads((out / "ridgeline_quality.json").read_text())
    assert quality["method"]["method"] == "gptq"
    assert len(quality["method"]["matrices"]) == 7 * ModelFolder.open("python-1m").config["num_hidden_layers"]
    assert all(each["error_ratio"] < 1.001 for each in quality["method"]["matrices"])
    assert 0 < quality["comparison"]["kl"]["mean"] < 1
    done = ridgeline("generate", out, "def f(", "--max-tokens=4", "--temperature=0", "--num-threads=1")
    assert done.code == 0, done.err
    assert ridgeline("quantize", "python-1m", *options(text, out)).code == 2  # it is there


def test_the_folder_of_a_gguf_file_has_its_tokenizer(ridgeline, text, tmp_path):
    """And its defaults: what a file says beside its weights becomes the files of a folder."""
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    file, out = tmp_path / "model.gguf", tmp_path / "out"
    done = ridgeline("quantize", "python-1m", "--method=rtn", "--bits=8", "--format=gguf", *options(text, file))
    assert done.code == 0, done.err
    done = ridgeline("quantize", file, "--method=rtn", *options(text, out))
    assert done.code == 0, done.err
    assert "comparison" in json.loads((out / "ridgeline_quality.json").read_text())
    source, made = ModelFolder.open(file), ModelFolder.open(out)
    assert made.generation_config == source.generation_config
    for code in ("def f(x):\n    return '<|endoftext|>'\n", "ñ → 5"):
        assert made.text_tokenizer().encode(code) == source.text_tokenizer().encode(code)
    assert made.text_tokenizer().special_tokens == source.text_tokenizer().special_tokens


def test_a_model_without_a_tokenizer_is_refused_before_the_work(ridgeline, text, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ModelFolder.open("python-1m").path, source, ignore=shutil.ignore_patterns("tokenizer*"))
    done = ridgeline("quantize", source, "--method=rtn", *options(text, tmp_path / "out"))
    assert done.code == 2 and "source has no tokenizer" in done.err
    assert not (tmp_path / "out.partial").exists()


def test_what_is_worse_than_max_kl_leaves_its_report_alone(ridgeline, text, tmp_path):
    out = tmp_path / "out"
    done = ridgeline("quantize", "python-1m", "--method=rtn", "--max-kl=0.001", *options(text, out))
    assert done.code == 1
    assert "refused: the KL is" in done.err
    assert [path.name for path in out.iterdir()] == ["ridgeline_quality.json"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--method=best"],
            "method must be one of awq, fp8, gptq, hqq, llm-int8, mxfp4, nf4, nvfp4, rtn, smoothquant, sparsegpt, "
            "wanda",
        ),
        (["--bits=5"], "bits must be one of 4, 8"),
        (["--max-kl=0.1", "--eval-tokens=0"], "--max-kl needs a measurement"),
        (["--length=4096"], "no calibration text has 1024 tokens"),
        (["--eval-text", "{text}"], "is calibration text and held-out text"),
        (["--out", "{text}"], "exists already"),
    ],
)
def test_wrong_options_are_told_in_a_line(ridgeline, text, tmp_path, arguments, message):
    given = [argument.format(text=text) for argument in arguments]
    done = ridgeline("quantize", "python-1m", *options(text, tmp_path / "out"), *given)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_kill_9_loses_no_finished_layer_and_changes_no_byte(ridgeline, text, tmp_path):
    """A folder of a run that is killed twice on the way is that of a run that was not."""
    command = "quantize", "python-1m", "--method=gptq", "--length=32", "--samples=4", "--eval-tokens=0"
    command += "--num-threads=1", "--text", str(text)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shards = (tmp_path / "killed.partial").glob
    start = "from ridgeline.cli import main; main()"
    for least in (1, 3):
        with Child([sys.executable, "-c", start, *command, "--out", str(killed)]) as process:
            deadline = time.monotonic() + PATIENCE_S
            while len(list(shards("*.safetensors"))) < least:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert not killed.exists()
    layers = sorted(shards("*.safetensors"))[:3]  # the last shard has what is in no layer
    finished = {path.name: path.stat().st_mtime_ns for path in layers}
    for out in (killed, whole):
        ran = ridgeline(*command, "--out", out)
        assert ran.code == 0, ran.err
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
    assert {name: (killed / name).stat().st_mtime_ns for name in finished} == finished, "not computed again"
