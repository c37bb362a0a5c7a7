"""`ridgeline evaluate`: its figures beside the trainer's own, its table, and what it refuses."""

import json

import numpy as np
import pytest
import torch

from ridgeline.backends.reference.dense import DenseModel
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.compress.train import bits_per_byte
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

TEXT = 'import os\n\n\ndef walk(path):\n    """Yield names."""\n    for name in os.listdir(path):\n        yield name\n'


def test_the_command_agrees_with_training_s_own_measure(tmp_path, ridgeline):
    """float32 in the engine beside the dense model, on one window; int4 is worse, and its KL what its logits say."""
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    (tmp_path / "a.py").write_text(TEXT * 3)
    arguments = (f"--text={tmp_path / 'a.py'}", "--num-threads=1", "--json", "--code=1")
    options = ("--base-option=kv_dtype=float32", "--quantize=int4", "--quantize-group-size=32")
    done = ridgeline("evaluate", "python-1m", *arguments, *options)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    figures = found["comparison"]
    folder = ModelFolder.open("python-1m")
    spec = read_spec(folder.config)
    program = lower(spec)
    dense = DenseModel(program, as_tensors(load_weights(folder, spec, program, FLOAT32)))
    ids = np.array(folder.tokenizer().encode(TEXT * 3), dtype=np.uint16)
    assert figures["base_bits_per_byte"] == pytest.approx(
        bits_per_byte(dense, ids, figures["num_bytes"], torch.float32), rel=1e-4
    )
    assert 0.01 < figures["kl"]["mean"] < 0.5
    assert figures["kl"]["standard_error"] is None  # one document
    assert found["model"]["choices"]["quantize"].startswith("int4")
    assert found["level"] is None
    assert found["code"]["num_functions"] == 1


def test_a_base_of_another_vocabulary_is_refused(ridgeline, model_folder):
    done = ridgeline("evaluate", "python-1m", "--base", model_folder, "--num-threads=1", "--tokens=64")
    assert done.code == 2
    assert "has another vocabulary than python-1m" in done.err


def test_a_table_for_people(ridgeline, model_folder):
    done = ridgeline("evaluate", model_folder, "--num-threads=1", "--tokens=64", "--quantize=int8")
    assert done.code == 0, done.err
    for words in ("KL, bits per token", "same first choice", "no verdict below 50,000 tokens"):
        assert words in done.out
    done = ridgeline("evaluate", model_folder, "--num-threads=1", "--tokens=64", "--code=1")
    assert done.code == 2
    assert "none fits the context" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-option=kv_dtype"], "NAME=VALUE"),
        (["--base-option=quantize_group_size=many"], "must be a number"),
        (["--base-option=kv_dtyp=int8"], "did you mean kv_dtype"),
        (["--text=/no/such/file"], "cannot be read"),
        (["--base=python-9m", "--code=3", "--text=README.nothing"], "cannot be read"),
    ],
)
def test_wrong_options_are_told_in_a_line(ridgeline, arguments, message):
    done = ridgeline("evaluate", "python-1m", *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
