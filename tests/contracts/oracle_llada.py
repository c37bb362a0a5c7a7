"""LLaDA in plain torch, as its paper (arXiv 2502.09992) describes it: a Llama whose tokens may see one another."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c["d_model"]))
        self.eps = c["rms_norm_eps"]

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, inner = c["d_model"], c["mlp_hidden_size"]
        self.heads, self.theta = c["n_heads"], c["rope_theta"]
        self.attn_norm, self.ff_norm = RmsNorm(c), RmsNorm(c)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, c["include_qkv_bias"]) for _ in range(3))
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.ff_out = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTH, visible_TT):
        h = self.attn_norm(x_BTH)
        q, k, v = (
            projection(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = self.rotated(q) @ self.rotated(k).transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~visible_TT, -math.inf).softmax(-1)
        x_BTH = x_BTH + self.attn_out((weights @ v).transpose(1, 2).flatten(2))
        h = self.ff_norm(x_BTH)
        return x_BTH + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))

    def rotated(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[2])[:, None] * self.theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        parts = {
            "wte": nn.Embedding(config["embedding_size"], config["d_model"]),
            "blocks": nn.ModuleList(Block(config) for _ in range(config["n_layers"])),
            "ln_f": RmsNorm(config),
        }
        if not config["weight_tying"]:
            parts["ff_out"] = nn.Linear(config["d_model"], config["embedding_size"], bias=False)
        self.model = nn.ModuleDict({"transformer": nn.ModuleDict(parts)})

    def forward(self, token_ids_BT, visible_TT=None):
        """Causal unless `visible_TT` says which keys each query sees; the published model sees all."""
        parts, length = self.model["transformer"], token_ids_BT.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril() if visible_TT is None else visible_TT
        x = parts["wte"](token_ids_BT)
        for block in parts["blocks"]:
            x = block(x, visible)
        head = parts["ff_out"] if "ff_out" in parts else parts["wte"]
        return F.linear(parts["ln_f"](x), head.weight)
