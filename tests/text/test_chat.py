"""Chat templates: the same text as transformers renders, and one clear error for what cannot be rendered."""

import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ridgeline.core.errors import ModelLoadError, RequestError
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Written for this test in the manner of the families they are named after.
LLAMA3_LIKE = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system_message }}
{%- if tools is not none %}
    {{- "Functions:\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("only one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson ~ "}<|eot_id|>" }}
    {%- elif message.role in ("tool", "ipython") %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- message.content | tojson if message.content is mapping else message.content }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

GEMMA_LIKE = """{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

MISTRAL_LIKE = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if message.role in ["user", "assistant"] %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.content %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

THINKING_LIKE = """
{%- macro content_of(message) -%}
    {%- if message.content is string -%}{{ message.content }}
    {%- else -%}{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if ns.found %}{% continue %}{% endif %}
    {%- if message.role == "user" %}{% set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = content_of(message) %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>%s %d of %d\n' % (message.role, loop.index, loop.length) ~ content | replace('\r\n', '\n') }}
    {%- generation %}{{- '<|im_end|>\n' }}{% endgeneration %}
    {%- if loop.index0 == ns.last %}{{ dict(last=true, n=[1, 2.5, none]) | tojson }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}
{{- documents | map(attribute='title') | join(', ') if documents }}
{%- for name, group in messages | groupby('role') %}{{ name ~ (group | length) }}{% endfor %}
"""

TEMPLATES = {"llama3": LLAMA3_LIKE, "gemma": GEMMA_LIKE, "mistral": MISTRAL_LIKE, "thinking": THINKING_LIKE}

USER = {"role": "user", "content": "  Grüße, 世界! <b>&amp;</b> 🦙\r\n'quoted' \"twice\" "}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <eine> Stadt",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHATS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Why?"}],
    "all": [SYSTEM, USER, ANSWER, {"role": "user", "content": ""}],
}
TOOL_CHAT = [
    USER,
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich", "n": [1, None]}}}],
    },
    {"role": "tool", "content": {"°C": 21.5}},
]


def reference(source, messages, **kwargs):
    return render_jinja_template(
        [messages], chat_template=source, **{"tools": None, "documents": None, **TOKENS, **kwargs}
    )[0][0]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_text_as_transformers(name, chat, tools, add_generation_prompt):
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    template = ChatTemplate({"default": TEMPLATES[name]}, TOKENS)
    try:
        expected = reference(TEMPLATES[name], CHATS[chat], **options)
    except Exception as error:
        with pytest.raises(RequestError) as caught:
            template.render(CHATS[chat], **options)
        assert str(caught.value) == str(error)
        assert caught.value.param == "messages"
    else:
        assert template.render(CHATS[chat], **options) == expected


def test_tool_calls_content_parts_documents_and_variables():
    llama3 = ChatTemplate({"default": LLAMA3_LIKE}, TOKENS)
    assert llama3.render(TOOL_CHAT) == reference(LLAMA3_LIKE, TOOL_CHAT, add_generation_prompt=True)
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}, {"type": "text", "text": "!"}]}
    ]
    documents = [{"title": "A", "text": "a"}, {"title": "B", "text": "b"}]
    ours = ChatTemplate({"default": THINKING_LIKE}, TOKENS).render(
        parts, variables={"documents": documents, "enable_thinking": False}
    )
    expected = reference(THINKING_LIKE, parts, documents=documents, enable_thinking=False, add_generation_prompt=True)
    assert ours == expected
    assert "</think>" in ours and "A, B" in ours and "see!" in ours


def test_qwen2_template_as_transformers_applies_it(shared_data, qwen2):
    theirs = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen2")
    template = ChatTemplate.from_tokenizer(qwen2)
    for chat in CHATS.values():
        text = template.render(chat)
        assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        expected_ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert qwen2.encode(text, add_special_tokens=False) == expected_ids


def test_named_templates(shared_data):
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert (template.render([USER]), template.render([USER], tools=TOOLS)) == ("plain", "tools")
    with pytest.raises(ModelLoadError, match="default"):
        ChatTemplate({"rag": "x"}, {})
    assert ChatTemplate.from_tokenizer(Tokenizer.from_folder(shared_data / "models" / "stories260K")) is None


def test_strftime_now_gives_the_date():
    text = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {}).render([])
    assert len(text) == 10 and text[4] == text[7] == "-"


def test_raise_exception_passes_its_message_on():
    with pytest.raises(RequestError, match=r"^System role not supported$") as caught:
        ChatTemplate({"default": GEMMA_LIKE}, TOKENS).render([SYSTEM, USER])
    assert caught.value.param == "messages"


def test_messages_a_template_cannot_use_are_a_request_error():
    template = ChatTemplate({"default": GEMMA_LIKE}, TOKENS)
    for messages in ([], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}]):
        with pytest.raises(RequestError) as caught:
            template.render([*messages, USER] if messages else [])
        assert caught.value.param == "messages"


def test_only_plain_data_reaches_a_template():
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, TOKENS)
    deep = json.loads("[" * 100 + "]" * 100)
    for content in (object(), open, b"x", {1: 2}, deep, {"a": [Tokenizer]}):
        with pytest.raises(RequestError):
            template.render([{"role": "user", "content": content}])
    for variables in ({"messages": []}, {"bos_token": "x"}, {"render budget": 1}, {"f": print}):
        with pytest.raises(RequestError) as caught:
            template.render([USER], variables=variables)
        assert caught.value.param == "chat_template_kwargs"


def test_long_conversations_are_rendered():
    messages = [USER, ANSWER] * 500 + [{"role": "user", "content": "x" * 1_000_000}]
    for source in TEMPLATES.values():
        text = ChatTemplate({"default": source}, TOKENS).render(messages)
        assert text == reference(source, messages, add_generation_prompt=True)
    with pytest.raises(RequestError, match="writes more than 4194304 characters"):
        ChatTemplate({"default": GEMMA_LIKE}, TOKENS).render([{"role": "user", "content": "x" * 4_200_000}])


def test_special_tokens_are_the_variables_transformers_gives(shared_data, tmp_path):
    folder = shared_data / "models" / "stories260K"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = ChatTemplate.from_tokenizer(Tokenizer.from_folder(tmp_path))
    assert ours.render([USER]) == theirs.apply_chat_template([USER], tokenize=False) == "<s>|</s>|<unk>|"
