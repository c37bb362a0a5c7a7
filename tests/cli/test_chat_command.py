"""`ridgeline chat` with piped input: every output is that of LLM.chat on the history."""

import json

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import RequestError

TOKENS = 6


def as_messages(texts, system=None):
    """Alternating user and assistant texts."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@pytest.fixture(scope="module")
def llm(model_folder):
    return LLM(str(model_folder))


@pytest.fixture(scope="module")
def completion(llm):
    """The greedy output to alternating texts, by the Python API."""

    def completion(*texts, system=None):
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        return llm.chat(as_messages(texts, system), params, use_tqdm=False)[0].outputs[0].text

    return completion


@pytest.fixture
def chat(ridgeline, model_folder):
    def run(stdin, *options):
        return ridgeline("chat", "-m", model_folder, "--temperature", 0, "--max-tokens", TOKENS, *options, stdin=stdin)

    return run


def test_history_is_kept_until_reset(chat, completion):
    first = completion("import os")
    second = completion("import os", first, "return a")
    assert second != completion("return a"), "the history must show for this test to mean anything"
    done = chat("import os\nreturn a\n/reset\n\nimport os\n")
    assert done.code == 0
    assert done.out == f"{first}\n{second}\n{first}\n"
    assert done.err == ""


def test_exit_ends_the_conversation(chat, completion):
    done = chat("import os\n/exit\nimport os\n")
    assert (done.code, done.out) == (0, completion("import os") + "\n")


def test_system_prompt_stays_in_front(chat, completion):
    system = "print(os.name)"
    first = completion("import os", system=system)
    assert first != completion("import os")
    done = chat("import os\n/reset\nimport os", "--system", system)
    assert done.out == f"{first}\n{first}\n"


def test_oldest_exchange_is_dropped_when_the_context_is_full(chat, llm, completion):
    texts = ["import os " * 4, "return a", "print(os)"]
    first = completion(texts[0])
    second = completion(texts[0], first, texts[1])
    third = completion(texts[1], second, texts[2])
    whole = llm.chat_template().render(as_messages([texts[0], first, texts[1], second, texts[2]]))
    context = len(llm.get_tokenizer().encode(whole, add_special_tokens=False)) + TOKENS
    done = chat("\n".join(texts) + "\n", "--max-model-len", context - 1)
    assert (done.code, done.out) == (0, f"{first}\n{second}\n{third}\n")
    assert "oldest 2 messages" in done.err and done.err.count("\n") == 1
    assert chat("\n".join(texts) + "\n", "--max-model-len", context).err == ""


def test_a_message_that_never_fits_is_refused_and_forgotten(chat, completion):
    first = completion("import os")
    done = chat("import os\n" + "return a " * 200 + "\nreturn a\n")
    assert done.code == 0
    assert "does not fit" in done.err and done.err.count("\n") == 1
    assert done.out == f"{first}\n{completion('import os', first, 'return a')}\n"


@pytest.fixture
def bare_folder(model_folder, tmp_path):
    """The model without its chat template."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_model_without_template_is_refused(ridgeline, bare_folder):
    done = ridgeline("chat", "-m", bare_folder, stdin="hello\n")
    assert done.code == 2
    assert "no chat template" in done.err and "--chat-template FILE" in done.err and done.err.count("\n") == 1
    with pytest.raises(RequestError, match="no chat template"):
        LLM(str(bare_folder)).chat([{"role": "user", "content": "hello"}], use_tqdm=False)


def test_a_template_can_be_given(ridgeline, bare_folder, tmp_path):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = tmp_path / "template.jinja"
    template.write_text(source)
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    llm = LLM(str(bare_folder))
    messages = [{"role": "user", "content": "import os"}]
    (expected,) = llm.chat(messages, params, chat_template=source, use_tqdm=False)
    assert expected.prompt == "<user>import os"
    options = ("--temperature", 0, "--max-tokens", TOKENS, "--chat-template", template)
    done = ridgeline("chat", bare_folder, *options, stdin="import os\n")
    assert (done.code, done.out, done.err) == (0, expected.outputs[0].text + "\n", "")
    for wrong, code, words in (("nothing.jinja", 2, "cannot be read"), ("broken.jinja", 3, "chat template 'default'")):
        (tmp_path / "broken.jinja").write_text("{% for %}")
        done = ridgeline("chat", bare_folder, "--chat-template", tmp_path / wrong, stdin="hello\n")
        assert done.code == code and words in done.err and done.err.count("\n") == 1


def test_quick_answers_one_message_with_counts_and_speeds(chat, completion):
    done = chat("not read\n", "--quick", "import os")
    assert (done.code, done.out) == (0, completion("import os") + "\n")
    assert done.err.startswith(f"{TOKENS} tokens in ") and "tokens/s" in done.err


def test_input_must_be_utf8(chat):
    done = chat(b"\xff\n")
    assert done.code == 2
    assert "not UTF-8" in done.err
