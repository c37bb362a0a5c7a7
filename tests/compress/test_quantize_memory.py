"""What `ridgeline quantize` holds in memory grows with the largest layer, not with their number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_quantize import CONFIGS, folder_of

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
LAYER_BYTES = 4 * 256 * (3 * 1024 + 2 * 256 + 2 * 128)  # in float32
FEW, MANY = 2, 14
PEAK = """
import sys
from pathlib import Path
from ridgeline.compress.quantize import QuantizeJob
from ridgeline.compress.recipe import Recipe
from ridgeline.quality.texts import Texts
from ridgeline.weights.folder import ModelFolder

def told(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def quantize(number, folder):
    more = {"rotated": {"rotate": True}, "mixed": {"mean_bits": 5.5}, "plain": {}}[sys.argv[2]]
    recipe = Recipe(method=sys.argv[1], group_size=32, samples=2, length=16, **more)
    texts = Texts("here", {"a.py": "def f(x): return [x * 3 for _ in range(9)]\\n" * 9})
    QuantizeJob(ModelFolder.open(folder), recipe, texts, Path(f"{folder}-out{number}")).run(lambda progress: None)

for number, folder in enumerate(sys.argv[3:]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = told("VmRSS")
    quantize(number, folder)
    print(told("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell peaks of memory")
@pytest.mark.parametrize(
    ("method", "turn"), [("rtn", "plain"), ("rtn", "rotated"), ("rtn", "mixed"), ("gptq", "plain")]
)
def test_more_layers_take_no_more_memory(tmp_path, method, turn):
    few, many = (
        folder_of(tmp_path / str(count), CONFIGS["llama"] | SIZES | {"num_hidden_layers": count}).path
        for count in (FEW, MANY)
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, method, turn, str(few), str(few), str(many)]  # the first one warms up
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    _, of_few, of_many = map(int, done.stdout.split())
    assert of_many - of_few < 1.5 * LAYER_BYTES, (of_few / LAYER_BYTES, of_many / LAYER_BYTES)
    assert Path(f"{many}-out2.partial").exists()
