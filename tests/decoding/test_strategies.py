"""Every file of the folder is a strategy: found by its name, with all that the scheduler asks of one."""

import inspect
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import ridgeline.decoding.strategies as folder
from ridgeline.core.config import EngineConfig
from ridgeline.decoding.strategies import build_strategy, kinds
from ridgeline.decoding.strategy import Strategy

SPEC = SimpleNamespace(head="head", diffusion=SimpleNamespace(mask_id=3))  # what a strategy reads of a DecoderSpec
CONFIG = EngineConfig.of("any", speculate="ngram")


def test_the_kinds_are_the_files():
    assert set(kinds()) == {path.stem for path in Path(folder.__file__).parent.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("kind", kinds())
def test_a_strategy_has_every_part_of_the_protocol(kind):
    strategy = build_strategy(kind, SPEC, CONFIG, time.monotonic)
    assert isinstance(strategy.rolls_back, bool)
    for name, method in inspect.getmembers(Strategy, inspect.isfunction):
        if not name.startswith("_"):
            expected = list(inspect.signature(method).parameters)[1:]
            assert list(inspect.signature(getattr(strategy, name)).parameters) == expected, name


def test_a_file_is_all_that_a_strategy_needs(monkeypatch, tmp_path):
    (tmp_path / "patient.py").write_text(
        "from ridgeline.decoding.strategies.autoregressive import Autoregressive\n"
        "class Patient(Autoregressive):\n"
        "    pass\n"
        "def build(spec, config, clock):\n"
        "    return Patient()\n"
    )
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    assert "patient" in kinds()
    assert type(build_strategy("patient", SPEC, CONFIG, time.monotonic)).__name__ == "Patient"
