"""A backend is a folder: one that the package has never heard of is found, chosen, asked and run."""

from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams, backends
from ridgeline.backends.select import names, offers
from ridgeline.core.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def toy(monkeypatch):
    """tests/backends is one more place where the package looks for its folders."""
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(Path(__file__).parent)])


def completion(shared_data, **options):
    llm = LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, **options)
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    return llm.engine, output.outputs[0].token_ids


def test_a_folder_is_a_backend(shared_data, toy):
    assert names() == ["native", "reference", "toy"]
    assert [backend.name for backend in offers()] == ["toy", "native", "reference"]
    engine, tokens = completion(shared_data, max_model_len=128)
    executable = engine.executor._executable
    assert type(executable).__name__ == "CountingExecutable"
    assert executable.num_steps == len(tokens) == 12
    assert (engine.info.choices["backend"].value, engine.info.choices["colour"].value) == ("toy", "blue")
    assert tokens == completion(shared_data, max_model_len=128, backend="reference")[1]


def test_it_is_passed_over_where_it_refuses(shared_data, toy):
    engine, _ = completion(shared_data, max_model_len=256)
    chosen = engine.info.choices["backend"]
    assert chosen.value in ("native", "reference")
    assert chosen.reason.startswith("no toy backend: it has contexts of up to 128 tokens")
    with pytest.raises(ConfigError, match="the toy backend cannot be used: it has contexts of up to 128 tokens"):
        completion(shared_data, max_model_len=256, backend="toy")


def test_without_the_folder_there_is_no_such_backend(shared_data):
    with pytest.raises(ConfigError, match="backend must be one of auto, native, reference, got 'toy'"):
        completion(shared_data, backend="toy")
