"""Write a model that says one of two things: a call of a tool where none has answered yet, a sentence otherwise.

One layer adds nothing, so that the next token is a function of the last one: the head has, for each step of a script,
the embedding of the token before it. A prompt ends in one of two tokens, which the chat template chooses. The pieces of
a script are tokens of their own, so a call comes in as many parts. What agents do with it is theirs, and real.
"""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, HEAD_DIM = 128, 2, 64
LOGIT = 60.0  # of the token that comes next; of others, chance gives a tenth
CALLS, SAYS, ENDS = "<|calls|>", "<|says|>", "<|ends|>"
TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools><tool_call>...</tool_call><|ends|>{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|ends|>
{%- endfor %}{% set outputs = messages | selectattr('role', 'equalto', 'tool') | list %}
{{- '<|calls|>' if tools and not outputs else '<|says|>' }}"""


def write_model(folder: Path, tokenizer: Path, tool: str, arguments: dict[str, str], sentence: str) -> None:
    """Write a Llama that calls `tool`, where there are tools and none has answered, and says `sentence` otherwise."""
    called, words = json.dumps(arguments), sentence.split(" ")
    call = ["<tool_call>", f'\n{{"name": "{tool}"', f', "arguments": {called[:9]}', f"{called[9:]}}}\n", "</tool_call>"]
    scripts = [CALLS, *call, ENDS], [SAYS, *(f"{word} " for word in words[:-1]), words[-1], ENDS]
    about = json.loads(tokenizer.read_text())
    first = max([*about["model"]["vocab"].values(), *(token["id"] for token in about["added_tokens"])]) + 1
    ids = {text: first + index for index, text in enumerate(dict.fromkeys(chain(*scripts)))}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    about["added_tokens"] += [
        {"id": number, "content": text, **plain, "special": text.startswith("<|")} for text, number in ids.items()
    ]
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(about))
    settings = {"chat_template": TEMPLATE, "eos_token": ENDS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _write_weights(folder, first + len(ids), [[ids[text] for text in script] for script in scripts], ids[ENDS])


def _write_weights(folder: Path, vocab_size: int, scripts: Sequence[Sequence[int]], eos: int) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN}
    config |= {"intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    config |= {"num_key_value_heads": 1, "max_position_embeddings": 1 << 17, "vocab_size": vocab_size}
    config |= {"eos_token_id": eos, "bos_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((vocab_size, HIDDEN)).astype(np.float32)
    embedding /= np.sqrt((embedding**2).mean(1, keepdims=True))
    head = np.zeros_like(embedding)
    for script in scripts:
        for before, token in zip(script, script[1:], strict=False):
            head[token] += embedding[before] * (LOGIT / HIDDEN)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"model.{name}.weight"] = np.ones(HIDDEN, np.float32)
    for name, outputs in {"q": HEADS * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM, "o": HIDDEN}.items():
        shape = outputs, HEADS * HEAD_DIM if name == "o" else HIDDEN
        tensors[f"model.layers.0.self_attn.{name}_proj.weight"] = np.zeros(shape, np.float32)
    for name in ("gate", "up", "down"):
        tensors[f"model.layers.0.mlp.{name}_proj.weight"] = np.zeros((HIDDEN, HIDDEN), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
