"""Hunyuan-Large in plain torch, as its technical report (arXiv 2411.02265) and cross-layer attention (arXiv 2405.12981)
describe it: the layers of a group all attend to the keys and values that the first of them projects. Each layer
normalises the queries, and the shared keys, with weights of its own, after the rotation."""

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Attention(nn.Module):
    def __init__(self, c, projects_kv):
        super().__init__()
        hidden, self.dim, bias = c["hidden_size"], c["attention_head_dim"], c["attention_bias"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias)
        if projects_kv:
            self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias)
            self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias)
        if c["use_qk_norm"]:
            self.query_layernorm = RmsNorm(self.dim, c["rms_norm_eps"])
            self.key_layernorm = RmsNorm(self.dim, c["rms_norm_eps"])
        base = c["rope_theta"]
        if c["rope_scaling"]:
            base *= c["rope_scaling"]["alpha"] ** (self.dim / (self.dim - 2))
        self.base = base

    def forward(self, x, shared):
        """Output and the projected keys and values before the rotation; `shared` are those of an earlier layer."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        if shared is None:
            k, v = (
                projection(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
                for projection in (self.k_proj, self.v_proj)
            )
        else:
            k, v = shared
        queries, keys = self.rotated(q), self.rotated(k)
        if hasattr(self, "query_layernorm"):
            queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
        group = self.heads // self.kv_heads
        scores = queries @ keys.repeat_interleave(group, 1).transpose(2, 3) / self.dim**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = (weights @ v.repeat_interleave(group, 1)).transpose(1, 2).flatten(2)
        return self.o_proj(out), (k, v)

    def rotated(self, x):
        half = self.dim // 2
        frequencies = 1.0 / self.base ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.arange(x.shape[2]).float()[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Mlp(nn.Module):
    def __init__(self, c, size):
        super().__init__()
        hidden, bias = c["hidden_size"], c["mlp_bias"]
        self.gate_proj, self.up_proj = nn.Linear(hidden, size, bias), nn.Linear(hidden, size, bias)
        self.down_proj = nn.Linear(size, hidden, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wg = nn.Linear(c["hidden_size"], c["num_experts"], bias=False)


class Experts(nn.Module):
    """Each token's best experts, weighted by their probabilities: as they are for one, of a sum of 1 for several."""

    def __init__(self, c):
        super().__init__()
        self.top_k = c["moe_topk"]
        self.gate = Router(c)
        self.experts = nn.ModuleList(Mlp(c, c["moe_intermediate_size"]) for _ in range(c["num_experts"]))
        if c["use_mixed_mlp_moe"]:
            self.shared_mlp = Mlp(c, c["intermediate_size"] * c["num_shared_expert"])

    def forward(self, x):
        best = self.gate.wg(x).softmax(-1).topk(self.top_k, -1)
        weights = best.values / best.values.sum(-1, keepdim=True) if self.top_k > 1 else best.values
        out = self.shared_mlp(x) if hasattr(self, "shared_mlp") else torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (best.indices == number)).sum(-1, keepdim=True)
        return out


class Block(nn.Module):
    def __init__(self, c, index, projects_kv):
        super().__init__()
        self.self_attn = Attention(c, projects_kv)
        is_dense = c["num_experts"] == 1 or index < c["moe_layer_num_skipped"]
        self.mlp = Mlp(c, c["intermediate_size"]) if is_dense else Experts(c)
        self.input_layernorm = RmsNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RmsNorm(c["hidden_size"], c["rms_norm_eps"])


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.share = c["cla_share_factor"] if c["use_cla"] else 1
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c, i, i % self.share == 0) for i in range(c["num_hidden_layers"]))
        self.norm = RmsNorm(c["hidden_size"], c["rms_norm_eps"])


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids_BT):
        x, shared = self.model.embed_tokens(token_ids_BT), None
        for index, block in enumerate(self.model.layers):
            if index % self.model.share == 0:
                shared = None
            out, shared = block.self_attn(block.input_layernorm(x), shared)
            x = x + out
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.lm_head(self.model.norm(x))
