"""A server whose model has no chat template: what it says, and `--chat-template`."""

import pytest
from live_server import new_engine, serving

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.server.app import create_app
from ridgeline.server.settings import ServerSettings
from ridgeline.text.chat import NAMED

MESSAGES = [{"role": "user", "content": "Once"}]


@pytest.fixture
def bare(shared_data):
    return shared_data / "models/stories260K"


def test_without_a_template_chat_says_what_is_missing(bare):
    with serving(new_engine(bare)) as server:
        response = server.post("chat/completions", messages=MESSAGES)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "no chat template: start the server with --chat-template FILE" in message
        assert all(name in message for name in NAMED)


def test_a_name_makes_the_prompt(bare):
    with serving(new_engine(bare), chat_template="phi3") as server:
        ids = server.client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        expected = server.engine.engine.intake.encode(
            "<|user|>\nOnce<|end|>\n<|assistant|>\n", add_special_tokens=False
        )
        assert ids == expected
        assert server.post("chat/completions", messages=MESSAGES, max_tokens=2).status_code == 200


def test_a_given_template_makes_the_prompt(bare, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} upon{% endfor %}")
    with serving(new_engine(bare), chat_template=str(template)) as server:
        options = {"max_tokens": 5, "temperature": 0}
        chat = server.post("chat/completions", messages=MESSAGES, **options).json()["choices"][0]["message"]["content"]
        engine = server.engine.engine
        prompt = engine.intake.encode("Once upon", add_special_tokens=False)
        assert chat == server.complete(prompt=prompt, **options)["choices"][0]["text"]


@pytest.mark.parametrize(("name", "error"), [("nothing.jinja", ConfigError), ("broken.jinja", ModelLoadError)])
def test_a_template_that_cannot_be_used_stops_the_start(bare, tmp_path, name, error):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    engine = new_engine(bare)
    with pytest.raises(error, match="chat template"):
        create_app(engine, engine.tokenizer, ServerSettings(chat_template=str(tmp_path / name)))
