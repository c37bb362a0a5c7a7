"""The model that tests of published heads draft for."""

import pytest
from tiny_models import build

from drafting import TINY
from ridgeline import LLM
from ridgeline.decoding import model_drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build("llama", 3, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(target):
    return LLM(str(target.folder.path), **TINY)


@pytest.fixture
def one_round(monkeypatch):
    """Every step has one round, as where something has to be seen of each."""
    monkeypatch.setattr(model_drafts, "MAX_ROUNDS", 1)
