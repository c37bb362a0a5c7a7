"""The table "Adding something is adding one file" of docs/architecture.md, done row by row in a copy of the package.

A test writes the file that its row names, edits nothing else, and a new process, which imports the copy, uses it.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent
PRELUDE = """
import sys
from pathlib import Path
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
sys.path.insert(0, {root!r})
import ridgeline
assert Path(ridgeline.__file__).is_relative_to({root!r}), ridgeline.__file__
"""
TIMEOUT_S = 120
# Rows of the table that have a test of their own: they need a compiler, or a longer story than a file.
ELSEWHERE = {"a native op", "an ISA level", "a backend", "an engine option"}
TESTED = {
    "a model family": "test_a_family",
    "an op": "test_an_op",
    "a quantization scheme": "test_a_quantization_scheme",
    "a format of stored weights": "test_a_format_of_stored_weights",
    "a method of quantization": "test_a_method_of_quantization",
    "a logits processor": "test_a_logits_processor",
    "a kind of decoding": "test_a_strategy",
    "a proposer of drafts": "test_a_proposer",
    "a proposer that computes a model": "test_a_drafter",
    "a kind of cache memory": "test_a_cache_group",
    "a workload": "test_a_workload",
    "a model to train": "test_a_preset",
    "a command": "test_a_command",
    "a sampling parameter": "test_a_sampling_parameter_is_a_field_and_its_processor",
}


class Copy:
    """A copy of the package: the models are links to the originals."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.package = root / "ridgeline"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__", "models"))
        (self.package / "models").symlink_to(PACKAGE / "models")
        native = find_spec("ridgeline._native")
        if native is not None and native.origin is not None and not list(self.package.glob("_native*.so")):
            (self.package / Path(native.origin).name).symlink_to(native.origin)

    def add(self, path: str, text: str) -> None:
        assert not (self.package / path).exists()
        (self.package / path).parent.mkdir(exist_ok=True)
        (self.package / path).write_text(text)

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.package / path).read_text()
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.package / path).write_text(text.replace(old, new))

    def run(self, code: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE.format(root=str(self._root)) + code, *arguments],
            env={**os.environ, "PYTHONPATH": ""},
            cwd=self._root,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def test_every_row_of_the_table_has_a_test():
    text = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## Adding something is adding one file\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| a")]
    assert set(rows) == ELSEWHERE | set(TESTED)
    assert all(callable(globals()[name]) for name in TESTED.values())


def test_the_copy_is_what_runs(copy):
    assert copy.run("print(ridgeline.__file__)").strip() == str(copy.package / "__init__.py")


def test_a_method_of_quantization(copy):
    copy.add(
        "compress/methods/nothing.py",
        """from ridgeline.compress.methods import rtn

NEEDS_STATISTICS = False

def balance(weights, statistics, grid):
    return None

def quantize(weight_NK, statistics, grid):
    return rtn.quantize(0 * weight_NK, None, grid)
""",
    )
    out = copy.run("""
from ridgeline.cli import main
try:
    main(["quantize", "python-1m", "--method", "nothing", "--out", "nothing-model", "--eval-tokens", "0"])
except SystemExit as done:
    assert not done.code
from ridgeline import LLM
print(LLM("nothing-model", num_threads=1).engine.info.weight_bytes < 2_000_000)
""")
    assert out.splitlines()[-1] == "True"


def test_a_family(copy):
    copy.add(
        "spec/families/toyllama.py",
        """from dataclasses import replace
from ridgeline.spec.families import llama

def read(config):
    return replace(llama.read(config), model_type="toyllama")
""",
    )
    out = copy.run("""
import json
from ridgeline import LLM, SamplingParams
from ridgeline.weights.folder import ModelFolder
folder = Path("toyllama-model"); folder.mkdir()
bundled = ModelFolder.open("python-1m").path
for file in bundled.iterdir():
    (folder / file.name).symlink_to(file)
config = json.loads((bundled / "config.json").read_text()) | {"model_type": "toyllama", "architectures": ["Toy"]}
(folder / "config.json").unlink(); (folder / "config.json").write_text(json.dumps(config))
params = SamplingParams(max_tokens=8, temperature=0)
outputs = [LLM(model).generate("import os", params, use_tqdm=False)[0] for model in (str(folder), "python-1m")]
texts = [output.outputs[0].text for output in outputs]
assert texts[0] == texts[1] != "", texts
print("same")
""")
    assert out.endswith("same\n")


def test_an_op(copy):
    copy.add(
        "program/ops/toy.py",
        """from ridgeline.program.op import Plain
from ridgeline.program.pricing import OpRow, pointwise

ROWS = {"toy_double": OpRow(Plain, 1, (0,), lambda attrs, inputs, weights: (inputs[0],), pointwise(1))}
""",
    )
    copy.add(
        "backends/reference/ops/toy.py",
        """def toy_double(attrs, inputs, weights, memory):
    return (2 * inputs[0],)
""",
    )
    copy.run("""
import torch
from ridgeline.backends.reference.dense import DenseMemory
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.program.op import Op, Program
from ridgeline.program.opset import OPSET
op = Op("toy_double", "twice", ("x",), ("y",))
assert OPSET["toy_double"].infer(op.attrs, [("T", 4)], []) == (("T", 4),)
program = Program((op,), {"x": ("T", 4), "y": ("T", 4)}, {}, (), 8, 8)
values = interpret(program, {}, {"x": torch.ones(3, 4)}, DenseMemory((), 1, 3))
assert torch.equal(values["y"], torch.full((3, 4), 2.0))
""")


def test_a_logits_processor(copy):
    copy.add(
        "decoding/processors/toy_only.py",
        """class ToyOnly:
    order = 45
    in_step = False

    def uses(self, row):
        return True

    def apply(self, logits_RV, rows):
        logits_RV[:, :] = -1e9
        logits_RV[:, 65] = 0.0
        return logits_RV
""",
    )
    copy.run("""
from ridgeline import LLM, SamplingParams
(output,) = LLM("python-1m").generate("import os", SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
assert output.outputs[0].token_ids == [65] * 3, output.outputs[0].token_ids
""")
    (copy.package / "decoding/processors/toy_only.py").unlink()  # it applies to every request


def test_a_quantization_scheme(copy):
    text = (PACKAGE / "quant/schemes/int8.py").read_text()
    copy.add("quant/schemes/toy8.py", text)
    copy.run("""
from ridgeline import LLM, SamplingParams
params = SamplingParams(max_tokens=8, temperature=0)
llms = [LLM("python-1m", quantize=scheme, backend="reference") for scheme in ("toy8", "int8")]
texts = [llm.generate("import os", params, use_tqdm=False)[0].outputs[0].text for llm in llms]
assert texts[0] == texts[1] != "", texts
""")


def test_a_cache_group(copy):
    copy.add("cache/groups/toy.py", "from ridgeline.cache.groups.full import build\n")
    copy.run("""
from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager
cache = CacheManager(CacheLayout(4, (GroupLayout("toy", (0,), None, 8, 16),)), prefix_caching=True)
assert cache.admit(1, list(range(9)), salt="").num_tokens == 0
assert cache.reserve(1, 9) is not None
""")


def test_a_strategy(copy):
    copy.add("decoding/strategies/toy.py", "from ridgeline.decoding.strategies.autoregressive import build\n")
    copy.run("""
from ridgeline.decoding.strategies import build_strategy, kinds
assert "toy" in kinds()
assert build_strategy("toy", None, None, None).rolls_back is False
""")


def test_a_proposer(copy):
    copy.add(
        "decoding/proposers/stubborn.py",
        "from ridgeline.decoding.proposers import Draft\n"
        "class Stubborn:\n"
        "    def propose(self, view, max_tokens):\n"
        "        return Draft([7] * max_tokens, 0)\n"
        "    def forget(self, view):\n"
        "        pass\n"
        "def build(config):\n"
        "    return Stubborn()\n",
    )
    copy.run("""
from ridgeline import LLM, SamplingParams
params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
plain, drafted = (
    LLM("python-1m", num_threads=1, deterministic=True, **options).generate(["def f"], params, use_tqdm=False)
    for options in ({}, {"speculate": "stubborn", "adaptive_speculation": False})
)
assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
""")


def test_a_drafter(copy):
    copy.add(
        "decoding/drafters/sevens.py",
        "from ridgeline.decoding.drafters import Drafted\n"
        "class Sevens:\n"
        "    def max_tokens(self, view):\n"
        "        return 4\n"
        "    def lag(self, view):\n"
        "        return 0\n"
        "    def draft(self, asked, max_catch_up):\n"
        "        return {request.view.seq_id: Drafted([7] * request.num_tokens) for request in asked}\n"
        "    def forget(self, view):\n"
        "        pass\n"
        "def build(companion):\n"
        "    return Sevens()\n",
    )
    copy.run("""
from ridgeline import LLM, SamplingParams
params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
options = {"speculate": "sevens:python-1m", "adaptive_speculation": False}
llm = LLM("python-1m", num_threads=1, deterministic=True, **options)
(drafted,) = llm.generate(["def f"], params, use_tqdm=False)
(plain,) = LLM("python-1m", num_threads=1, deterministic=True).generate(["def f"], params, use_tqdm=False)
assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
assert llm.engine.loop.stats().drafts["sevens"].num_draft_tokens > 0
""")


def test_a_workload(copy):
    copy.add(
        "bench/workloads/toy.py",
        """from dataclasses import dataclass
from ridgeline.bench.workload import BenchRequest, Workload

@dataclass(frozen=True)
class Toy(Workload):
    num_requests: int = 2

    def requests(self):
        return [BenchRequest(prompt=[5, 6, 7], max_tokens=2) for _ in range(self.num_requests)]

WORKLOAD = Toy
""",
    )
    out = copy.run(
        "from ridgeline.cli import main; main(sys.argv[1:])",
        *("bench", "offline", "python-1m", "--workload", "toy:num_requests=3", "--repeats", "1", "--warmups", "0"),
    )
    assert "3" in out


def test_a_preset(copy):
    preset = (PACKAGE / "compress/presets/python-1m.json").read_text()
    copy.add("compress/presets/toy.json", preset)
    copy.run("""
from ridgeline.compress.presets import load_preset
assert load_preset("toy") == load_preset("python-1m")
""")


def test_a_command(copy):
    copy.add(
        "cli/toy.py",
        '''"""Say hello."""

import typer

def toy(name: str) -> None:
    """Say hello."""
    typer.echo(f"hello {name}")
''',
    )
    main = "from ridgeline.cli import main; main(sys.argv[1:])"
    assert copy.run(main, "toy", "you") == "hello you\n"
    assert "Say hello" in copy.run(main, "--help")


def test_a_format_of_stored_weights(copy):
    copy.add(
        "weights/formats/toy8.py",
        """from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.weights.formats import PackedTensor

FORMAT = StoredFormat("uniform", 8, 0, scale="float32")

def find(checkpoint, settings):
    entries = checkpoint.entries
    codes = [name for name in entries if name.endswith(".codes")]
    names = [name.removesuffix(".codes") for name in codes]
    return [PackedTensor(n, entries[c].shape, (c, n + ".scale"), FORMAT, _matrix) for c, n in zip(codes, names)]

def _matrix(parts, rows):
    codes, scales = parts
    return StoredMatrix(FORMAT, codes[rows], scales[rows])
""",
    )
    copy.run("""
import json
import numpy as np, torch
from safetensors.torch import load_file, save_file
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.quant import scheme
from ridgeline.quant.stored import dequantize
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
bundled = ModelFolder.open("python-1m").path
tensors = load_file(bundled / "model.safetensors")
name = "model.layers.0.mlp.down_proj.weight"
rounded = scheme("int8").quantize(tensors.pop(name).float().numpy(), scheme("int8").stored_format(None, False))
tensors[name + ".codes"] = torch.from_numpy(np.ascontiguousarray(rounded.codes))
tensors[name + ".scale"] = torch.from_numpy(np.ascontiguousarray(rounded.scales))
folder = Path("toy8-model"); folder.mkdir()
save_file(tensors, folder / "model.safetensors")
config = json.loads((bundled / "config.json").read_text()) | {"quantization_config": {"quant_method": "toy8"}}
(folder / "config.json").write_text(json.dumps(config))
spec = read_spec(ModelFolder.open(folder).config)
weights = load_weights(folder, spec, lower(spec), FLOAT32)
assert np.array_equal(weights["layers.0.ffn.down.weight"], dequantize(rounded))
""")


def test_a_sampling_parameter_is_a_field_and_its_processor(tmp_path):
    """Two files of source; it then is an argument in Python, an option of the commands and a field over HTTP."""
    copy = Copy(tmp_path)
    last = "    diffusion: DiffusionParams | None = None"
    copy.replace("core/params.py", last, '    toy_token: int = option(-1, "Always this token.", low=-1)\n' + last)
    copy.add(
        "decoding/processors/toy_token.py",
        """class ToyToken:
    order = 45
    in_step = False

    def uses(self, row):
        return row.params.toy_token >= 0

    def apply(self, logits_RV, rows):
        for index, row in enumerate(rows):
            if self.uses(row):
                logits_RV[index, :] = -1e9
                logits_RV[index, row.params.toy_token] = 0.0
        return logits_RV
""",
    )
    copy.run("""
import msgspec
from ridgeline import LLM, SamplingParams
from ridgeline.server.openai.fields import with_parameters
from ridgeline.server.openai.protocol import CompletionRequest
params = SamplingParams(max_tokens=3, temperature=0, toy_token=65)
(output,) = LLM("python-1m").generate("import os", params, use_tqdm=False)
assert output.outputs[0].token_ids == [65] * 3, output.outputs[0].token_ids
body = msgspec.json.decode(b'{"prompt": "import os", "toy_token": 65}', type=with_parameters(CompletionRequest))
assert body.toy_token == 65
""")
    generate = ("generate", "python-1m", "import os", "--toy-token", "65", "--max-tokens", "3", "--json")
    assert "[65,65,65]" in copy.run("from ridgeline.cli import main; main(sys.argv[1:])", *generate)
