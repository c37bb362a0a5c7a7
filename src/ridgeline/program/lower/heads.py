"""Lower heads that draft: programs that read hidden states of a model beside its tokens.

`FEATURES` are hidden states, one row a token. A head's own weights are named `draft.*`; the others are the model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.program.lower import LAYERS, lower_head
from ridgeline.program.lower.attention import lower_attention
from ridgeline.program.lower.builder import Builder
from ridgeline.program.lower.feed_forward import lower_gated_mlp
from ridgeline.program.op import FEATURES, LOGIT_ROWS, LOGITS, TOKEN_IDS, Program
from ridgeline.program.ops.dense import ActivationAttrs, EmbedAttrs, ScaleAttrs, SliceAttrs
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Predictor, RmsNorm


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Declares one decoder layer over the embedding of a token and the hidden state before it.

    `layers` are those of the model whose inputs it reads, the number of layers standing for the output of the last.
    Version 3 reads several through one product, `norm_before_fc` behind a norm of them all, `fc_norm` behind one of
    each, and norms what its layer reads; it goes on with its own output, with `norm_output` behind its final norm.
    Earlier ones read the output of the model's final norm, and have the product over embedding and hidden state.
    `vocab_size` is that of its logits.
    """

    is_version_3: bool
    hidden_size: int
    vocab_size: int
    layers: tuple[int, ...]
    attention: GroupedQueryAttention
    feed_forward: GatedMlp
    norm: RmsNorm
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    fc_bias: bool
    own_embedding: bool
    own_head: bool


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Declares heads over one hidden state, the output of the final norm: residual layers, then logits.

    Head `i`, from 0, guesses the token `i + 2` places on. With `shares_head` all have their logits by one matrix.
    """

    num_heads: int
    num_layers: int
    vocab_size: int
    bias: bool
    shares_head: bool


def lower_eagle(head: EagleHead, target: DecoderSpec) -> tuple[Program, Program]:
    """Return the programs of a head that drafts for `target`: from the model's hidden states, side by side, to its
    features; and its step, whose tap takes the features' place behind the first drafted token."""
    b = _builder(target, head.hidden_size, head.vocab_size, head.hidden_size)
    table = "draft.embed.weight" if head.own_embedding else "embed.weight"
    table = b.weight(table, target.vocab_size, head.hidden_size)
    (e,) = b.emit("embed", "embed", (TOKEN_IDS,), (table,), EmbedAttrs(1.0))
    x = FEATURES
    if head.is_version_3:
        e = b.norm("draft.embed_norm", head.norm, e)
        g = b.norm("draft.hidden_norm", head.norm, x)
        x = g if head.norm_before_residual else x
        (inputs,) = b.emit("concat", "draft.inputs", (e, g))
    else:
        (joined,) = b.emit("concat", "draft.inputs", (e, x))
        inputs = x = b.linear("draft.fc", joined, head.hidden_size, head.fc_bias)
    (x,) = b.emit("add", "draft.mixer_sum", (x, lower_attention(b, "draft.attn", head.attention, inputs)))
    h = lower_gated_mlp(b, "draft.ffn", head.feed_forward, b.norm("draft.ffn_norm", head.norm, x))
    (own,) = b.emit("add", "draft.ffn_sum", (x, h))
    x = normed = b.norm("draft.final_norm", head.norm, own) if head.is_version_3 else own
    (x,) = b.emit("select_rows", "rows", (x, LOGIT_ROWS))
    if head.own_head:
        b.emit("lm_head", LOGITS, (x,), (b.weight("draft.head.weight", head.vocab_size, head.hidden_size),))
    else:
        assert target.head is not None, "only a model with a head has drafts"
        lower_head(b, target.head, x)
    fold = _fold(head, target) if head.is_version_3 else _final_norm(target)
    return fold, b.program((normed if head.norm_output else own,))


def lower_predictor(predictor: Predictor, target: DecoderSpec) -> tuple[Program, Program]:
    """Return the programs of a model's own predictor, as `lower_eagle` does; all weights are the model's."""
    b, at = _builder(target, target.hidden_size, target.vocab_size, target.hidden_size), f"layers.{len(target.layers)}"
    table = b.weight("embed.weight", target.vocab_size, target.hidden_size)
    (e,) = b.emit("embed", "embed", (TOKEN_IDS,), (table,), EmbedAttrs(target.embedding.scale))
    e = b.norm(f"{at}.embed_norm", predictor.norm, e)
    h = b.norm(f"{at}.hidden_norm", predictor.norm, FEATURES)
    (joined,) = b.emit("concat", f"{at}.inputs", (e, h))
    own = LAYERS[type(predictor.layer)](b, at, predictor.layer, b.linear(f"{at}.join", joined, b.width(h), bias=False))
    normed = b.norm(f"{at}.final_norm", predictor.norm, own)
    (x,) = b.emit("select_rows", "rows", (normed, LOGIT_ROWS))
    assert target.head is not None, "only a model with a head has a predictor"
    lower_head(b, target.head, x)
    return _final_norm(target), b.program((normed if predictor.returns_normed else own,))


def lower_medusa(heads: MedusaHeads, target: DecoderSpec) -> Program:
    """Return the program from the output of the last layer of `target` to the logits of all heads, side by side."""
    b = _builder(target, target.hidden_size, heads.vocab_size, target.hidden_size)
    h, logits = _normed(b, target), ""
    for number in range(heads.num_heads):
        x, prefix = h, f"draft.heads.{number}"
        for layer in range(heads.num_layers):
            y = b.linear(f"{prefix}.layers.{layer}", x, b.width(x), heads.bias)
            (y,) = b.emit("activation", f"{prefix}.act.{layer}", (y,), (), ActivationAttrs("silu"))
            (x,) = b.emit("add", f"{prefix}.sum.{layer}", (x, y))
        name = f"draft.heads.{0 if heads.shares_head else number}.head.weight"
        (y,) = b.emit("linear", f"{prefix}.logits", (x,), (b.weight(name, heads.vocab_size, b.width(x)),))
        logits = b.emit("concat", f"{prefix}.joined", (logits, y))[0] if logits else y
    return b.program()


def tapped(program: Program, layers: Sequence[int]) -> Program:
    """Return a model's program that retains the inputs of `layers` to the end of a step, as its taps."""
    before = [f"layers.{layer - 1}." if layer else "embed" for layer in layers]
    made = [[op for op in program.ops if op.label.startswith(label)][-1] for label in before]
    return replace(program, taps=tuple(op.outputs[0] for op in made))


def _fold(head: EagleHead, target: DecoderSpec) -> Program:
    b = _builder(target, target.hidden_size, target.vocab_size, len(head.layers) * target.hidden_size)
    x, size = b.norm("draft.input_norm", head.norm, FEATURES) if head.norm_before_fc else FEATURES, target.hidden_size
    if head.fc_norm:
        joined = ""
        for number in range(len(head.layers)):
            (part,) = b.emit("slice", f"draft.of_layer.{number}", (x,), (), SliceAttrs(number * size, size))
            part = b.norm(f"draft.fc_norm.{number}", head.norm, part)
            joined = b.emit("concat", f"draft.joined.{number}", (joined, part))[0] if joined else part
        x = joined
    b.linear("draft.fc", x, head.hidden_size, head.fc_bias)
    return b.program()


def _final_norm(target: DecoderSpec) -> Program:
    b = _builder(target, target.hidden_size, target.vocab_size, target.hidden_size)
    _normed(b, target)
    return b.program()


def _normed(b: Builder, target: DecoderSpec) -> str:
    """Add the final norm of the model, over the output of its last layer."""
    if target.final_norm is None:
        return b.emit("scale", "same", (FEATURES,), (), ScaleAttrs(1.0))[0]
    return b.norm("final_norm", target.final_norm, FEATURES)


def _builder(target: DecoderSpec, hidden_size: int, vocab_size: int, num_features: int) -> Builder:
    spec = DecoderSpec(target.model_type, vocab_size, hidden_size, target.max_positions, (), None, None)
    b = Builder(spec, target.max_positions)
    b.shapes[FEATURES] = ("T", num_features)
    return b
