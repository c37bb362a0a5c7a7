"""gpt-oss over HTTP: reasoning comes first in its channel, then the content or the call that a grammar forces.

The model is a tiny random one of that family, whose tokenizer has harmony's tokens. Biases make it write what it would
not by itself, and end messages.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, new_engine, serving

from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.forcing import calls_among_text, forced_calls, thoughts_before
from ridgeline.text.tools.formats import FORMATS
from ridgeline.weights.folder import ModelFolder

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
ENDS = ("<|return|>", "<|call|>")
NUM_PLAIN = 4096  # tokens of the tokenizer that gets them
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Hm?"}]
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.first <|constrain|>json<|message|>{"n": 3}'
HARMONY = FORMATS["openai"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("models") / "tiny-oss"
    set_seed(1)
    config = GptOssConfig(
        vocab_size=NUM_PLAIN + len(MARKS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=512,
        sliding_window=64,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    GptOssForCausalLM(config).save_pretrained(folder)
    ends = [NUM_PLAIN + MARKS.index(mark) for mark in ENDS]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    shutil.copyfile(ModelFolder.open("python-1m").path / "tokenizer.json", folder / "tokenizer.json")
    added = {str(NUM_PLAIN + at): {"content": mark, "special": True} for at, mark in enumerate(MARKS)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{# <|channel|> #}")
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model)


@pytest.fixture(scope="module")
def oss(model: Path) -> Iterator[LiveServer]:
    with serving(new_engine(model)) as server:
        yield server
        server.assert_idle()


def ask(server: LiveServer, tokenizer: Tokenizer, towards: tuple[str, ...], **body: object) -> dict:
    """The one choice of a chat, where the model likes to write some marks."""
    bias = {str(tokenizer.token_id(mark)): 60 for mark in towards}
    asked = {"messages": MESSAGES, "max_tokens": 250, "seed": 3, "logit_bias": bias, **body}
    response = server.post("chat/completions", **asked)
    assert response.status_code == 200, response.text
    whole = response.json()["choices"][0]
    pieces: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": ""}
    with server.client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                for call in delta.pop("tool_calls", ()):
                    pieces["arguments"] += call["function"].get("arguments", "")
                for name in ("content", "reasoning_content"):
                    pieces[name] += delta.get(name) or ""
    message = whole["message"]
    assert pieces["content"] == (message["content"] or "")
    assert pieces["reasoning_content"] == (message.get("reasoning_content") or "")
    assert pieces["arguments"] == "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return whole


def tool(name: str, **more: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def follows(tokenizer: Tokenizer, text: str, **asked: object) -> bool:
    """Tell whether a whole output may be this text, in which marks are tokens."""
    compiler = GrammarCompiler(
        tokenizer, NUM_PLAIN + len(MARKS), frozenset(NUM_PLAIN + MARKS.index(mark) for mark in ENDS)
    )
    matcher = compiler.compile(StructuredOutputsParams(**asked)).matcher.deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_the_constraint_binds_in_the_final_channel(tokenizer: Tokenizer) -> None:
    asked = {"json": SCHEMA, "preamble": thoughts_before(HARMONY, tokenizer, final=True)}
    for text in (f'{FINAL}{{"n": 5}}', f'{THOUGHT}{FINAL}{{"n": 5}}', f'{THOUGHT}{THOUGHT}{FINAL}{{"n": 5}}'):
        assert follows(tokenizer, text, **asked), text
    for text in (
        '{"n": 5}',
        f"{FINAL}hm",
        f"{THOUGHT}{FINAL}",
        CALL,
        f'{THOUGHT}<|channel|>analysis<|message|>{{"n": 5}}',
    ):
        assert not follows(tokenizer, text, **asked), text


@pytest.mark.parametrize("strict", [False, True], ids=["forced", "strict"])
def test_a_call_begins_with_its_recipient(tokenizer: Tokenizer, strict: bool) -> None:
    grammar = (calls_among_text if strict else forced_calls)(
        HARMONY, {"first": (SCHEMA, True)}, tokenizer, parallel=True
    )
    asked = {"grammar": grammar, "preamble": thoughts_before(HARMONY, tokenizer, final=False)}
    for text in (CALL, THOUGHT + CALL):
        assert follows(tokenizer, text, **asked), text
    assert follows(tokenizer, f"{THOUGHT}{FINAL}Hi.", **asked) == strict
    for text in (CALL.replace("first", "other"), CALL.replace("3", '"3"'), THOUGHT, "Hi.", CALL[:-1]):
        assert not follows(tokenizer, text, **asked), text


def test_structured_content_comes_behind_the_reasoning(oss: LiveServer, tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    whole = ask(oss, tokenizer, ("<|end|>",), response_format=form)
    content = json.loads(whole["message"]["content"])
    assert whole["finish_reason"] == "stop" and 0 <= content["n"] <= 9
    long = ask(oss, tokenizer, (), response_format=form, max_tokens=40)
    assert long["message"]["content"] or long["message"]["reasoning_content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "first"}}])
@pytest.mark.parametrize("strict", [False, True])
def test_a_forced_call_comes_behind_the_reasoning(
    oss: LiveServer, tokenizer: Tokenizer, choice: object, strict: bool
) -> None:
    tools = [tool("first", strict=strict), tool("second", strict=strict)]
    whole = ask(oss, tokenizer, ("<|end|>",), tools=tools, tool_choice=choice)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] in (("first", "second") if choice == "required" else ("first",))
    assert 0 <= json.loads(call["function"]["arguments"])["n"] <= 9
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("towards", [("<|end|>", "<|return|>"), ("<|end|>", "<|constrain|>", "<|call|>")])
def test_strict_tools_under_auto(oss: LiveServer, tokenizer: Tokenizer, towards: tuple[str, ...]) -> None:
    for seed in range(6):
        whole = ask(oss, tokenizer, towards, tools=[tool("first", strict=True)], seed=seed)
        for call in whole["message"].get("tool_calls") or ():
            assert call["function"]["name"] == "first" and 0 <= json.loads(call["function"]["arguments"])["n"] <= 9
        assert "<|" not in (whole["message"]["content"] or "")
