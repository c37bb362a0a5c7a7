"""Named chat templates: what each makes of a conversation."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.server.openai.dialogue import INSTRUCTIONS
from ridgeline.text.chat import NAMED, ChatTemplate, read_template
from ridgeline.text.tools.formats import chosen_format

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = '{"name": "f", "parameters": {"x": 1}}'
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
USED = [
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "T", "tool_call_id": "1"},
]
H, E = "<|start_header_id|>", "<|end_header_id|>\n\n"
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
        f"<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{CALLED}<|im_end|>\n"
        "<|im_start|>tool\nT<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma": (
        "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
        f"<s><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n{CALLED}<end_of_turn>\n"
        "<start_of_turn>user\nT<end_of_turn>\n<start_of_turn>model\n",
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
        f"<s>[INST] U [/INST] {CALLED} </s><s>[INST] T [/INST]",
    ),
    "llama3": (
        f"<s>{H}system{E}S<|eot_id|>{H}user{E}U<|eot_id|>{H}assistant{E}A<|eot_id|>{H}user{E}V<|eot_id|>{H}assistant{E}",
        f"<s>{H}user{E}U<|eot_id|>{H}assistant{E}{CALLED}<|eot_id|>{H}ipython{E}T<|eot_id|>{H}assistant{E}",
    ),
    "mistral-v3": (
        "<s>[INST] S\n\nU[/INST] A</s>[INST] V[/INST]",
        f"<s>[INST] U[/INST] {CALLED}</s>[INST] T[/INST]",
    ),
    "mistral-v7-tekken": (
        "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[INST]V[/INST]",
        f"<s>[INST]U[/INST]{CALLED}</s>[INST]T[/INST]",
    ),
    "phi3": (
        "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
        f"<|user|>\nU<|end|>\n<|assistant|>\n{CALLED}<|end|>\n<|user|>\nT<|end|>\n<|assistant|>\n",
    ),
    "zephyr": (
        "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n",
        f"<|user|>\nU</s>\n<|assistant|>\n{CALLED}</s>\n<|user|>\nT</s>\n<|assistant|>\n",
    ),
}


def test_each_is_here() -> None:
    assert EXPECTED.keys() == NAMED.keys()


@pytest.mark.parametrize("name", NAMED)
def test_it_makes_prompts(name: str) -> None:
    template = ChatTemplate({"default": read_template(name)}, TOKENS)
    assert (template.render(TALK), template.render(USED)) == EXPECTED[name]
    bare = ChatTemplate({"default": read_template(name)}, {})  # a tokenizer may have no such tokens
    assert bare.render(TALK) == template.render(TALK).replace("<s>", "").replace("</s>", "")


@pytest.mark.parametrize("name", NAMED)
def test_what_is_asked_first_stays_as_turns_follow(name: str) -> None:
    """Or the prefix cache would hold nothing of use."""
    template = ChatTemplate({"default": read_template(name)}, TOKENS)
    assert template.render(TALK).startswith(template.render(TALK[:2], add_generation_prompt=False))


@pytest.mark.parametrize("name", NAMED)
def test_calls_are_read_as_the_server_asks_for_them(name: str) -> None:
    """It says how to call where a template does not, and no template shows another way."""
    source = read_template(name)
    assert "tools" not in source and '"parameters"' in INSTRUCTIONS
    form = chosen_format("auto", source)
    assert form is not None and form.bare and form.call == '{"name": "$NAME", "parameters": $ARGS}'
    assert not ChatTemplate({"default": source}, TOKENS).takes_text_arguments


def test_a_name_that_is_none_is_taken_for_a_file_and_told_the_names() -> None:
    with pytest.raises(ConfigError, match="give a Jinja text file, or one of chatml, gemma, llama2"):
        read_template("chatmle")
