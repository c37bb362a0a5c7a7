"""Bits per byte and what goes with it: windows, the error of a paired difference, KL over two lists of tokens."""

import json
import math
import sys

import numpy as np
import pytest
from benchmarks import perplexity
from benchmarks.perplexity import Document, Scores, compare, cut, lumped_kl, paired_difference

from ridgeline import LLM
from ridgeline.compress.train import bits_per_byte


@pytest.mark.parametrize("length", [2, 9, 10, 11, 19, 20, 95])
def test_windows_predict_every_token_but_the_first_once(length):
    windows = cut(list(range(length)), 10)
    assert [token_id for window in windows for token_id in window[1:]] == list(range(1, length))
    assert all(2 <= len(window) <= 10 for window in windows)
    assert all(late[0] == early[-1] for early, late in zip(windows, windows[1:]))


def test_the_error_of_a_ratio_of_sums():
    assert paired_difference([12.0, 24.0], [10.0, 20.0], [1, 2]) == (2.0, 0.0)  # the same per byte in both
    difference, error = paired_difference([13.0, 23.0], [10.0, 20.0], [1, 2])
    assert difference == 2.0
    assert error == pytest.approx(math.sqrt(2 * (1 + 1)) / 3)
    assert math.isnan(paired_difference([1.0], [0.0], [1])[1])


def test_the_error_is_that_of_many_texts():
    """Beside the spread of the difference over texts drawn anew."""
    rng = np.random.default_rng(0)

    def draw():
        sizes = rng.integers(50, 500, 40)
        return paired_difference(sizes * rng.normal(0.3, 0.2, 40), np.zeros(40), sizes)

    drawn = [draw() for _ in range(2000)]
    spread = np.std([difference for difference, _ in drawn])
    assert np.mean([error for _, error in drawn]) == pytest.approx(spread, rel=0.1)


def scores(probabilities_TV, targets, num_top):
    log_p = np.log(probabilities_TV)
    order = np.argsort(-log_p, axis=1, kind="stable")[:, :num_top]
    return Scores(log_p[np.arange(len(targets)), targets], order, np.take_along_axis(log_p, order, 1))


def test_lumped_kl():
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(12), 50), rng.dirichlet(np.ones(12), 50)
    exact = (p * np.log(p / q)).sum(1)
    targets = np.zeros(50, dtype=int)
    whole = lumped_kl(scores(p, targets, 12), scores(q, targets, 12))
    assert np.allclose(whole, exact)
    part = lumped_kl(scores(p, targets, 6), scores(q, targets, 6))
    assert (part <= exact + 1e-12).all() and (part >= 0).all()
    assert np.allclose(lumped_kl(scores(p, targets, 6), scores(p, targets, 6)), 0)


def test_figures_of_a_format():
    documents = [Document("a", [[0, 1, 2]], 4), Document("b", [[0, 3]], 2)]
    p = [np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]), np.array([[0.5, 0.25, 0.25]])]
    q = [np.array([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])]
    base = [scores(each, [0] * len(each), 3) for each in p]
    other = [scores(each, [0] * len(each), 3) for each in q]
    found = compare("int8", 7, documents, other, base)
    assert found.bits_per_byte == pytest.approx((2 + 1 + 2) / 6)
    assert found.perplexity == pytest.approx(2 ** (5 / 3))
    assert found.delta == pytest.approx(2 / 6)
    assert found.top1_agreement == pytest.approx(1 / 3)
    assert found.kl_lumped_bits == pytest.approx((0.5 - 0.25 + 0 + 0.5 - 0.25) / 3)
    assert found.bits_by_document == pytest.approx({"a": 3.0, "b": 2.0})


def test_the_command_agrees_with_training_s_own_measure(tmp_path, monkeypatch):
    """float32 in the engine beside the dense model, on one window; int4 is worse, and bfloat16 hardly."""
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    from ridgeline.backends.reference.dense import DenseModel
    from ridgeline.backends.reference.tensors import as_tensors
    from ridgeline.core.dtypes import FLOAT32
    from ridgeline.program.lower import lower
    from ridgeline.spec.families import read_spec
    from ridgeline.weights.folder import ModelFolder
    from ridgeline.weights.load import load_weights

    text = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield name\n" * 3
    (tmp_path / "a.py").write_text(text)
    formats = ["bfloat16", "int4 g32"]
    arguments = ["--model=python-1m", f"--text={tmp_path / 'a.py'}", f"--out={tmp_path}", "--threads=1", "--formats"]
    monkeypatch.setattr(sys, "argv", ["perplexity.py", *arguments, *formats])
    perplexity.main()
    (path,) = tmp_path.glob("*/*.json")
    report = json.loads(path.read_text())
    assert [each["name"] for each in report["formats"]] == ["float32", *formats]
    assert report["text"]["num_bytes"] == len(text)
    float32, bfloat16, int4 = (each["bits_per_byte"] for each in report["formats"])
    folder = ModelFolder.open("python-1m")
    spec = read_spec(folder.config)
    import torch

    program = lower(spec)
    dense = DenseModel(program, as_tensors(load_weights(folder, spec, program, FLOAT32)))
    tokenizer = LLM("python-1m").get_tokenizer()
    ids = np.array(tokenizer.encode(text), dtype=np.uint16)
    assert float32 == pytest.approx(bits_per_byte(dense, ids, len(text), torch.float32), rel=1e-4)
    assert abs(bfloat16 - float32) < abs(int4 - float32)
