"""Heads that draft, as their papers describe them, in plain torch over transformers' hidden states.

Written from EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), Medusa (2401.10774) and the predictor layers of DeepSeek-V3
(2412.19437) and Qwen3-Next with none of Ridgeline's code. `write` saves a random head in the published layout; `greedy`
gives what it drafts behind a text.
"""

import copy
import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from tiny_models import randomize


class Written:
    """A head with its tensors `t` and its `config()`."""

    def write(self, folder, config=None, tensors=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config() | (config or {})))
        tensors = {
            name: tensor.contiguous() for name, tensor in (self.t | (tensors or {})).items() if tensor is not None
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


class Eagle(Written):
    """An EAGLE head of version 1 or 3 for `model`; version 3 has a draft vocabulary, of every other token."""

    heads, kv_heads, head_dim, eps = 4, 2, 8, 1e-5

    def __init__(self, model, version, layers, prefix="layers.0.", seed=0, flags=()):
        self.model, self.version, self.layers, self.prefix, self.flags = model, version, layers, prefix, flags
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
            if "norm_before_fc" in flags:
                self.t["input_norm.weight"] = 1 + matrix(len(layers) * hidden)
            if "fc_norm" in flags:
                self.t |= {f"fc_norm.{at}.weight": 1 + matrix(hidden) for at in range(len(layers))}
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
        config |= dict.fromkeys(self.flags, True)
        if self.version == 3:
            config |= {"draft_vocab_size": len(self.ids), "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        return config

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.t[name]

    def pass_once(self, embedded, features):
        """Hidden states [T, H] behind the layer, for pairs of embedding and feature."""
        at = self.prefix
        if self.version == 3:
            normed = self.norm(features, at + "hidden_norm.weight")
            x = normed if "norm_before_residual" in self.flags else features
            inputs = torch.cat((self.norm(embedded, at + "input_layernorm.weight"), normed), -1)
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
            features = torch.cat([hidden[layer][0] for layer in self.layers], -1)
            if "norm_before_fc" in self.flags:
                features = self.norm(features, "input_norm.weight")
            if "fc_norm" in self.flags:
                parts = features.chunk(len(self.layers), -1)
                features = torch.cat([self.norm(x, f"fc_norm.{at}.weight") for at, x in enumerate(parts)], -1)
            features = features @ self.t["fc.weight"].T
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
            features = torch.cat((features, last if "norm_output" in self.flags else y))
        return drafted


class Medusa(Written):
    """Medusa heads for `model`, in the names of their first publication, of merged checkpoints or of vLLM.

    vLLM's have a vocabulary of every other token; with `shared` also one matrix for the logits of all heads.
    """

    def __init__(self, model, names, num_heads=4, num_layers=1, bias=True, shared=False, seed=0):
        self.model, self.names, self.shared = model, names, shared
        self.num_heads, self.num_layers = num_heads, num_layers
        hidden, vocab = model.spec.hidden_size, model.spec.vocab_size
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape):
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        self.ids = torch.arange(1, vocab, 2) if names == "vllm" else torch.arange(vocab)
        self.layers = [
            [(matrix(hidden, hidden) * 2, matrix(hidden) if bias else None) for _ in range(num_layers)]
            for _ in range(num_heads)
        ]
        self.heads = [matrix(len(self.ids), hidden) for _ in range(1 if shared else num_heads)]
        before = {"paper": "", "merged": "medusa_head.", "vllm": "medusa_heads."}[names]
        self.t = {}
        for j, layers in enumerate(self.layers):
            for i, (weight, added) in enumerate(layers):
                name = f"{before}blocks.{j}.layers.{i}" if names == "vllm" else f"{before}{j}.{i}.linear"
                self.t |= {f"{name}.weight": weight} | ({f"{name}.bias": added} if bias else {})
        for j, head in enumerate(self.heads):
            name = f"{before}lm_heads.{j}" if names == "vllm" else f"{before}{j}.{num_layers}"
            self.t[f"{name}.weight"] = head
        if names == "vllm":
            self.t["token_map"] = self.ids

    def config(self):
        if self.names != "vllm":  # published configs say how many heads were trained, not how many there are
            return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.model.spec.hidden_size,
            "vocab_size": self.model.spec.vocab_size,
            "truncated_vocab_size": len(self.ids),
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": self.layers[0][0][1] is not None,
            "original_lm_head": self.shared,
        }

    def hidden_states(self, token_ids):
        """Those behind the final norm [T, H]."""
        oracle = self.model.oracle
        return oracle(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]

    def residual(self, j, x):
        for weight, bias in self.layers[j]:
            y = x @ weight.T + (0 if bias is None else bias)
            x = x + y * torch.sigmoid(y)
        return x

    @torch.no_grad()
    def fit(self, token_ids, begin):
        """Turn the heads to what stands in a text behind its first `begin` tokens: they guess most of it."""
        states = self.hidden_states(token_ids)[begin:]
        wanted = (torch.tensor(token_ids[begin:])[:, None] == self.ids).float()
        pairs = [(self.residual(j, states[: -j - 2]), wanted[j + 2 :]) for j in range(self.num_heads)]
        if self.shared:
            pairs = [tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))]
        for head, (x, y) in zip(self.heads, pairs, strict=True):
            head.copy_(torch.linalg.lstsq(x, y, driver="gelsd").solution.T)

    @torch.no_grad()
    def ranked(self, token_ids):
        """The tokens that each head guesses behind `token_ids`, the best first: all from the state before the newest
        token."""
        state = self.hidden_states(token_ids)[-2]
        heads = [self.heads[0 if self.shared else j] for j in range(self.num_heads)]
        return [
            self.ids[(head @ self.residual(j, state)).argsort(descending=True)].tolist() for j, head in enumerate(heads)
        ]


class Predictor:
    """A random predictor layer for a DeepSeek-V3 or a Qwen3-Next, whose layer is transformers' own.

    `write` saves the model again with it, under the names of the published checkpoints.
    """

    def __init__(self, model, seed=0):
        self.model, self.is_qwen = model, model.config["model_type"] == "qwen3_next"
        config = copy.deepcopy(model.oracle.config)
        number = config.num_hidden_layers
        if self.is_qwen:
            config.layer_types = [*config.layer_types, "full_attention"]
            config.mlp_only_layers, config.decoder_sparse_step = [], 1
        hidden, base = config.hidden_size, model.oracle.model
        self.norms = {name: copy.deepcopy(base.norm) for name in ("embed", "hidden", "out")}
        self.join = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = type(base.layers[0])(config, layer_idx=number).eval()
        for i, part in enumerate((*self.norms.values(), self.join, self.layer)):
            randomize(part, 100 * seed + i)
        self.at = "mtp.layers.0." if self.is_qwen else f"model.layers.{number}."

    def tensors(self):
        names = {"embed": "enorm", "hidden": "hnorm", "out": "shared_head.norm"}
        outside, join = self.at, f"{self.at}eh_proj.weight"
        if self.is_qwen:
            names = {"embed": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "out": "norm"}
            outside, join = "mtp.", "mtp.fc.weight"
        found = {f"{outside}{names[name]}.weight": norm.weight.detach() for name, norm in self.norms.items()}
        found[join] = self.join.weight.detach()
        for name, tensor in self.layer.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                for e, (gate, up) in enumerate(both.chunk(2) for both in tensor):
                    found[f"{self.at}mlp.experts.{e}.gate_proj.weight"] = gate
                    found[f"{self.at}mlp.experts.{e}.up_proj.weight"] = up
            elif name == "mlp.experts.down_proj":
                found |= {f"{self.at}mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
            else:
                found[self.at + name] = tensor
        if not self.is_qwen:
            oracle = self.model.oracle
            found[f"{self.at}embed_tokens.weight"] = oracle.get_input_embeddings().weight.detach()
            found[f"{self.at}shared_head.head.weight"] = oracle.get_output_embeddings().weight.detach()
        return found

    def write(self, folder, config=None, tensors=None):
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.model.folder.path.glob("*.json"):
            shutil.copy(file, folder)
        own = json.loads((folder / "config.json").read_text())
        own |= {} if self.is_qwen else {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(own | (config or {})))
        stored = load_file(self.model.folder.path / "model.safetensors") | self.tensors() | (tensors or {})
        stored = {name: tensor.clone().contiguous() for name, tensor in stored.items() if tensor is not None}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @torch.no_grad()
    def greedy(self, token_ids, count):
        """The `count` tokens that it drafts behind `token_ids`."""
        oracle = self.model.oracle
        hidden = oracle(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states
        features, tokens, drafted = hidden[-1][:, :-1], list(token_ids[1:]), []  # behind the final norm
        for _ in range(count):
            e = self.norms["embed"](oracle.get_input_embeddings()(torch.tensor([tokens])))
            x = self.join(torch.cat((e, self.norms["hidden"](features)), -1))
            places = torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
            y = self.layer(
                x,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=oracle.model.rotary_emb(x, places),
            )[:, -1:]
            normed = self.norms["out"](y)
            drafted.append(int(oracle.get_output_embeddings()(normed).argmax()))
            tokens.append(drafted[-1])
            features = torch.cat((features, normed if self.is_qwen else y), 1)
        return drafted
