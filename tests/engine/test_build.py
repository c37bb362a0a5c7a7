"""How an engine is put together: what the build may know, and what it does once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import LLM
from ridgeline.backends import base, select
from ridgeline.engine import build, sizing
from ridgeline.program.lower.builder import Builder

MAX_IMPORTS, MAX_LINES = 19, 150


def imports(module):
    """The modules that a module names in its imports, those for type checkers alone left out."""
    tree = ast.parse(Path(module.__file__).read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    named = [[alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] for node in nodes]
    return {name for names in named for name in names}


def test_the_build_knows_few_rooms():
    internal = {name for name in imports(build) if name.startswith("ridgeline")}
    assert len(internal) <= MAX_IMPORTS, sorted(internal)
    assert len(Path(build.__file__).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", [base, select, sizing, build], ids=lambda module: module.__name__)
def test_no_tensors_are_needed_to_choose(module):
    assert "torch" not in imports(module)


def test_offers_import_neither_torch_nor_native_code():
    program = """
import sys
from ridgeline.backends.select import offers
assert [backend.name for backend in offers()][-1] == "reference"
assert not {"torch", "ridgeline._native"} & set(sys.modules), "an offer is a promise, not the thing"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [{}, {"max_model_len": 64}, {"kv_cache_bytes": 1280 * 200}], ids=str)
def test_a_model_is_lowered_once_per_start(shared_data, monkeypatch, options):
    """Also where an unstated context has to shrink."""
    lowered = []
    program = Builder.program
    monkeypatch.setattr(Builder, "program", lambda self: (lowered.append(self.spec), program(self))[1])
    engine = LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, **options).engine
    assert len(lowered) == 1
    assert engine.program.context_length == engine.info.max_model_len
