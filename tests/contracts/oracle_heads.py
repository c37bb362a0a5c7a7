"""Heads that draft, as their papers describe them, in plain torch over transformers' hidden states.

Written from EAGLE (arXiv 2401.15077) and EAGLE-3 (2503.01840) with none of Ridgeline's code.
`write` saves a random head in the published layout; `greedy` gives what it drafts behind a text.
"""

import json

import torch
from safetensors.torch import save_file


class Eagle:
    """An EAGLE head of version 1 or 3 for `model`; version 3 has a draft vocabulary, of every other token."""

    heads, kv_heads, head_dim, eps = 4, 2, 8, 1e-5

    def __init__(self, model, version, layers, prefix="layers.0.", seed=0):
        self.model, self.version, self.layers, self.prefix = model, version, layers, prefix
        self.hidden = model.spec.hidden_size
        hidden, vocab = self.hidden, model.spec.vocab_size
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape):
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        inputs = 2 * hidden if version == 3 else hidden
        at = prefix + "self_attn."
        self.t = {
            "fc.weight": matrix(hidden, len(layers) * hidden if version == 3 else 2 * hidden),
            at + "q_proj.weight": matrix(self.heads * self.head_dim, inputs),
            at + "k_proj.weight": matrix(self.kv_heads * self.head_dim, inputs),
            at + "v_proj.weight": matrix(self.kv_heads * self.head_dim, inputs),
            at + "o_proj.weight": matrix(hidden, self.heads * self.head_dim),
            prefix + "mlp.gate_proj.weight": matrix(32, hidden),
            prefix + "mlp.up_proj.weight": matrix(32, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, 32),
            prefix + "post_attention_layernorm.weight": 1 + matrix(hidden),
        }
        self.ids = torch.arange(vocab)
        if version == 3:
            self.ids = torch.arange(1, vocab, 2)
            self.t |= {
                prefix + "hidden_norm.weight": 1 + matrix(hidden),
                prefix + "input_layernorm.weight": 1 + matrix(hidden),
                "norm.weight": 1 + matrix(hidden),
                "lm_head.weight": matrix(len(self.ids), hidden) * 4,
                "d2t": self.ids - torch.arange(len(self.ids)),
                "t2d": torch.isin(torch.arange(vocab), self.ids),
            }
        else:
            self.t |= {"fc.bias": matrix(hidden), "embed_tokens.weight": matrix(vocab, hidden)}

    def config(self):
        config = {
            "architectures": ["LlamaForCausalLMEagle3" if self.version == 3 else "LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 32,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "max_position_embeddings": 64,
            "vocab_size": self.model.spec.vocab_size,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        if self.version == 3:
            config |= {"draft_vocab_size": len(self.ids), "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        return config

    def write(self, folder, config=None, tensors=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config() | (config or {})))
        tensors = {
            name: tensor.contiguous() for name, tensor in (self.t | (tensors or {})).items() if tensor is not None
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.t[name]

    def pass_once(self, embedded, features):
        """Hidden states [T, H] behind the layer, for pairs of embedding and feature."""
        at = self.prefix
        if self.version == 3:
            x = features
            inputs = torch.cat(
                (self.norm(embedded, at + "input_layernorm.weight"), self.norm(features, at + "hidden_norm.weight")), -1
            )
        else:
            inputs = x = torch.cat((embedded, features), -1) @ self.t["fc.weight"].T + self.t["fc.bias"]
        q, k, v = (inputs @ self.t[f"{at}self_attn.{letter}_proj.weight"].T for letter in "qkv")
        length = len(x)
        q, k, v = (y.view(length, -1, self.head_dim) for y in (q, k, v))
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = (torch.cat((f, f), -1)[:, None] for f in (angles.cos(), angles.sin()))

        def rotated(y):
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        q, k = rotated(q), rotated(k)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q, k) * self.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
        x = x + out @ self.t[at + "self_attn.o_proj.weight"].T
        y = self.norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ self.t[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ self.t[at + "mlp.down_proj.weight"].T

    @torch.no_grad()
    def greedy(self, token_ids, count):
        """The `count` tokens that the head drafts behind `token_ids`."""
        oracle = self.model.oracle
        hidden = oracle(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states
        table = self.t.get("embed_tokens.weight", oracle.get_input_embeddings().weight)
        if self.version == 3:
            features = torch.cat([hidden[layer][0] for layer in self.layers], -1) @ self.t["fc.weight"].T
        else:
            features = hidden[-1][0]  # behind the final norm
        features, tokens = features[:-1], list(token_ids[1:])
        drafted = []
        for _ in range(count):
            y = self.pass_once(table[torch.tensor(tokens)], features)[-1:]
            last = self.norm(y, "norm.weight") if self.version == 3 else y
            head = self.t.get("lm_head.weight", oracle.get_output_embeddings().weight)
            token = int(self.ids[(last @ head.T).argmax()])
            drafted.append(token)
            tokens.append(token)
            features = torch.cat((features, y))
        return drafted
