"""DecoderSpec -> Program. Reads like the forward pass that it writes down.

Called once per model by the engine, the trainer and `ridgeline inspect`. No torch.
"""

from typing import assert_never

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import (
    LOGIT_ROWS,
    LOGITS,
    POSITIONS,
    STEP_INPUTS,
    TOKEN_IDS,
    ActivationAttrs,
    AttentionAttrs,
    Attrs,
    EmbedAttrs,
    KvState,
    KvWriteAttrs,
    NormAttrs,
    Op,
    Plain,
    Program,
    RopeAnglesAttrs,
    Shape,
    SoftcapAttrs,
    SplitHeadsAttrs,
)
from ridgeline.program.opset import OPSET
from ridgeline.spec.rope import frequencies
from ridgeline.spec.spec import (
    DecoderSpec,
    FeedForward,
    GatedMlp,
    GroupedQueryAttention,
    Layer,
    LayerNorm,
    Mlp,
    Norm,
    RmsNorm,
    Rope,
)


def lower(spec: DecoderSpec, context_length: int | None = None) -> Program:
    """The program of `spec` for sequences of up to `context_length` tokens (default: `spec.max_positions`).

    Raises ConfigError where shapes do not fit or a learned position table is shorter than the context.
    """
    return _Lowering(spec, context_length or spec.max_positions).run()


class _Lowering:
    """Appends ops; a value's name is the label of the op that makes it."""

    def __init__(self, spec: DecoderSpec, context_length: int) -> None:
        self.spec = spec
        self.context_length = context_length
        self.ops: list[Op] = []
        self.shapes: dict[str, Shape] = dict(STEP_INPUTS)
        self.weights: dict[str, tuple[int, ...]] = {}
        self.states: list[KvState] = []
        self.angles: dict[Rope, tuple[str, str]] = {}

    def run(self) -> Program:
        spec = self.spec
        x = self.embed()
        for index, layer in enumerate(spec.layers):
            x = self.layer(f"layers.{index}", layer, x)
        (x,) = self.emit("select_rows", "rows", (x, LOGIT_ROWS))
        x = self.norm("final_norm", spec.final_norm, x)
        self.head(x)
        return Program(
            tuple(self.ops), self.shapes, self.weights, tuple(self.states), spec.vocab_size, self.context_length
        )

    def embed(self) -> str:
        spec = self.spec
        table = self.weight("embed.weight", spec.vocab_size, spec.hidden_size)
        (x,) = self.emit("embed", "embed", (TOKEN_IDS,), (table,), EmbedAttrs(spec.embedding.scale))
        if spec.embedding.num_positions:
            if self.context_length > spec.embedding.num_positions:
                raise ConfigError(
                    f"context length {self.context_length} exceeds the {spec.embedding.num_positions} learned positions"
                )
            table = self.weight("positions.weight", spec.embedding.num_positions, spec.hidden_size)
            (p,) = self.emit("embed", "positions", (POSITIONS,), (table,), EmbedAttrs(1.0))
            (x,) = self.emit("add", "embed.sum", (x, p))
        return x

    def layer(self, at: str, layer: Layer, x: str) -> str:
        h = self.norm(f"{at}.mixer_norm", layer.mixer_norm, x)
        h = self.attention(f"{at}.attn", layer.mixer, h)
        if layer.mixer_post_norm:
            h = self.norm(f"{at}.mixer_post_norm", layer.mixer_post_norm, h)
        (x,) = self.emit("add", f"{at}.mixer_sum", (x, h))
        h = self.norm(f"{at}.ffn_norm", layer.ffn_norm, x)
        h = self.feed_forward(f"{at}.ffn", layer.feed_forward, h)
        if layer.ffn_post_norm:
            h = self.norm(f"{at}.ffn_post_norm", layer.ffn_post_norm, h)
        return self.emit("add", f"{at}.ffn_sum", (x, h))[0]

    def attention(self, at: str, mixer: GroupedQueryAttention, x: str) -> str:
        heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        q = self.heads(f"{at}.q", mixer, heads, self.linear(f"{at}.q", x, heads * dim, mixer.qkv_bias))
        k = self.heads(f"{at}.k", mixer, kv_heads, self.linear(f"{at}.k", x, kv_heads * dim, mixer.qkv_bias))
        v = self.linear(f"{at}.v", x, kv_heads * dim, mixer.qkv_bias)
        (v,) = self.emit("split_heads", f"{at}.v.heads", (v,), (), SplitHeadsAttrs(kv_heads))
        state = len(self.states)
        self.states.append(KvState(kv_heads, dim, mixer.window))
        self.emit("kv_write", f"{at}.kv_write", (k, v), (), KvWriteAttrs(state))
        attrs = AttentionAttrs(state, mixer.scale, mixer.window, mixer.softcap)
        (o,) = self.emit("attention", f"{at}.attention", (q, k, v), (), attrs)
        return self.linear(f"{at}.o", o, self.spec.hidden_size, mixer.out_bias)

    def heads(self, at: str, mixer: GroupedQueryAttention, num_heads: int, x: str) -> str:
        """Queries or keys by head: normalised and rotated where the mixer says so."""
        (x,) = self.emit("split_heads", f"{at}.heads", (x,), (), SplitHeadsAttrs(num_heads))
        if mixer.qk_norm:
            x = self.norm(f"{at}_norm", mixer.qk_norm, x)
        if mixer.rope:
            cos, sin = self.rope_angles(mixer.rope)
            (x,) = self.emit("rope", f"{at}.rope", (x, cos, sin))
        return x

    def feed_forward(self, at: str, ffn: FeedForward, x: str) -> str:
        match ffn:
            case GatedMlp():
                gate = self.linear(f"{at}.gate", x, ffn.size, ffn.bias)
                up = self.linear(f"{at}.up", x, ffn.size, ffn.bias)
                (h,) = self.emit("gated_activation", f"{at}.act", (gate, up), (), ActivationAttrs(ffn.activation))
            case Mlp():
                up = self.linear(f"{at}.up", x, ffn.size, ffn.bias)
                (h,) = self.emit("activation", f"{at}.act", (up,), (), ActivationAttrs(ffn.activation))
            case _:
                assert_never(ffn)
        return self.linear(f"{at}.down", h, self.spec.hidden_size, ffn.bias)

    def head(self, x: str) -> None:
        head = self.spec.head
        table = "embed.weight" if head.tied else self.weight("head.weight", self.spec.vocab_size, self.spec.hidden_size)
        weights = (table, self.weight("head.bias", self.spec.vocab_size)) if head.bias else (table,)
        if head.softcap is None:
            self.emit("lm_head", LOGITS, (x,), weights)
        else:
            (x,) = self.emit("lm_head", "head", (x,), weights)
            self.emit("softcap", LOGITS, (x,), (), SoftcapAttrs(head.softcap))

    def rope_angles(self, rope: Rope) -> tuple[str, str]:
        """cos and sin of a rope, computed once for all layers that share it."""
        if rope not in self.angles:
            table, scale = frequencies(rope, self.context_length)
            attrs = RopeAnglesAttrs(tuple(np.asarray(table, dtype=np.float64).tolist()), scale)
            name = f"rope.{len(self.angles)}"
            cos, sin = self.emit("rope_angles", name, (POSITIONS,), (), attrs, (f"{name}.cos", f"{name}.sin"))
            self.angles[rope] = (cos, sin)
        return self.angles[rope]

    def norm(self, at: str, norm: Norm, x: str) -> str:
        width = self.shapes[x][-1]
        assert isinstance(width, int)
        scale = self.weight(f"{at}.weight", width)
        match norm:
            case RmsNorm():
                return self.emit("rmsnorm", at, (x,), (scale,), NormAttrs(norm.eps, norm.unit_offset))[0]
            case LayerNorm():
                shift = self.weight(f"{at}.bias", width)
                return self.emit("layernorm", at, (x,), (scale, shift), NormAttrs(norm.eps))[0]
        assert_never(norm)

    def linear(self, at: str, x: str, out_features: int, bias: bool) -> str:
        in_features = self.shapes[x][-1]
        assert isinstance(in_features, int)
        weights = [self.weight(f"{at}.weight", out_features, in_features)]
        if bias:
            weights.append(self.weight(f"{at}.bias", out_features))
        return self.emit("linear", at, (x,), tuple(weights))[0]

    def weight(self, name: str, *shape: int) -> str:
        self.weights[name] = shape
        return name

    def emit(
        self,
        kind: str,
        label: str,
        inputs: tuple[str, ...],
        weights: tuple[str, ...] = (),
        attrs: Attrs = Plain(),  # noqa: B008 - frozen
        outputs: tuple[str, ...] | None = None,
    ) -> tuple[str, ...]:
        row = OPSET[kind]
        shapes = row.infer(attrs, [self.shapes[i] for i in inputs], [self.weights[w] for w in weights])
        names = outputs if outputs is not None else (label,) * len(shapes)
        self.shapes.update(zip(names, shapes, strict=True))
        self.ops.append(Op(kind, label, inputs, names, weights, attrs))
        return names
