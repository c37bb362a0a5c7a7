"""`ridgeline chat` with piped input: every answer is that of LLM.chat on the history."""

import json

import pytest

from ridgeline import LLM, SamplingParams

TOKENS = 6


def as_messages(texts, system=None):
    """Alternating user and assistant texts."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@pytest.fixture(scope="module")
def llm(model_folder):
    return LLM(str(model_folder))


@pytest.fixture(scope="module")
def answer(llm):
    """The greedy answer to alternating texts, by the Python API."""

    def answer(*texts, system=None):
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        return llm.chat(as_messages(texts, system), params, use_tqdm=False)[0].outputs[0].text

    return answer


@pytest.fixture
def chat(ridgeline, model_folder):
    def run(stdin, *options):
        return ridgeline("chat", "-m", model_folder, "--temperature", 0, "--max-tokens", TOKENS, *options, stdin=stdin)

    return run


def test_history_is_kept_until_reset(chat, answer):
    first = answer("import os")
    second = answer("import os", first, "return a")
    assert second != answer("return a"), "the history must show for this test to mean anything"
    done = chat("import os\nreturn a\n/reset\n\nimport os\n")
    assert done.code == 0
    assert done.out == f"{first}\n{second}\n{first}\n"
    assert done.err == ""


def test_exit_ends_the_conversation(chat, answer):
    done = chat("import os\n/exit\nimport os\n")
    assert (done.code, done.out) == (0, answer("import os") + "\n")


def test_system_prompt_stays_in_front(chat, answer):
    system = "print(os.name)"
    first = answer("import os", system=system)
    assert first != answer("import os")
    done = chat("import os\n/reset\nimport os", "--system", system)
    assert done.out == f"{first}\n{first}\n"


def test_oldest_exchange_is_dropped_when_the_context_is_full(chat, llm, answer):
    texts = ["import os " * 4, "return a", "print(os)"]
    first = answer(texts[0])
    second = answer(texts[0], first, texts[1])
    third = answer(texts[1], second, texts[2])
    whole = llm.chat_template().render(as_messages([texts[0], first, texts[1], second, texts[2]]))
    context = len(llm.get_tokenizer().encode(whole, add_special_tokens=False)) + TOKENS
    done = chat("\n".join(texts) + "\n", "--max-model-len", context - 1)
    assert (done.code, done.out) == (0, f"{first}\n{second}\n{third}\n")
    assert "oldest 2 messages" in done.err and done.err.count("\n") == 1
    assert chat("\n".join(texts) + "\n", "--max-model-len", context).err == ""


def test_a_message_that_never_fits_is_refused_and_forgotten(chat, answer):
    first = answer("import os")
    done = chat("import os\n" + "return a " * 200 + "\nreturn a\n")
    assert done.code == 0
    assert "does not fit" in done.err and done.err.count("\n") == 1
    assert done.out == f"{first}\n{answer('import os', first, 'return a')}\n"


def test_a_model_without_template_is_refused(ridgeline, model_folder, tmp_path):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    done = ridgeline("chat", "-m", tmp_path, stdin="hello\n")
    assert done.code == 2
    assert "no chat template" in done.err


def test_input_must_be_utf8(chat):
    done = chat(b"\xff\n")
    assert done.code == 2
    assert "not UTF-8" in done.err
