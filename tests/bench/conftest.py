"""The scripts under benchmarks/ are no part of the package: its tests import them from the checkout."""

import sys
from pathlib import Path

import pytest
import torch

from ridgeline.bench.offline import BenchEngine
from ridgeline.core.config import EngineConfig, ModelConfig, SchedulerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="module", autouse=True)
def threads():
    """Engines set the process's threads; the rest of the suite gets its own number back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stories(shared_data):
    return str(shared_data / "models" / "stories260K")


@pytest.fixture(scope="module")
def bench(stories):
    return BenchEngine(
        EngineConfig(
            model=ModelConfig(model=stories, dtype="float32"),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
            num_threads=1,
        )
    )
