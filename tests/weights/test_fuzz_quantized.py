"""Changed folders of every format load or are refused by a typed error; `python -m tests.fuzz quantized` goes on."""

from itertools import islice

import pytest
from tests.fuzz.harness import Checked, inputs
from tests.fuzz.quantized import MAKERS, quantized


@pytest.mark.parametrize("name", MAKERS)
def test_mutations(tmp_path, name):
    if name in ("pack", "int", "block", "nvfp4"):
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    checked = Checked(quantized(tmp_path, (name,)))
    for data in islice(inputs(checked.target, 1), 25):
        checked(data)
    assert checked.counts["refused"] > 5
