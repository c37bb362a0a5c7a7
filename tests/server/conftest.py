"""One live server over the stories260K model for all tests that need nothing special."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, new_engine, serving

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{% if message.role not in ["system", "user", "assistant"] %}{{ raise_exception("no such role here") }}{% endif %}\
{{ message.content }}{% if not loop.last %} {% endif %}{% endfor %}"""


@pytest.fixture(scope="session")
def golden(shared_data: Path) -> dict:
    """Greedy output of the model's own reference implementation."""
    return json.loads((shared_data / "models/stories260K/golden_greedy.json").read_text())


@pytest.fixture(scope="session")
def chat_model(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K, which has no chat template of its own, with one."""
    folder = tmp_path_factory.mktemp("models") / "stories-chat"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared_data / "models/stories260K" / name, folder / name)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def live(chat_model: Path) -> Iterator[LiveServer]:
    with serving(new_engine(chat_model)) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def thinker(model: Path) -> Iterator[LiveServer]:
    """A server of a module's own `model`."""
    with serving(new_engine(model)) as server:
        yield server
        server.assert_idle()
