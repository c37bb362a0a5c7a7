"""Ops that a family uses in a way of its own, in small programs written op by op: native at every level as in torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("ridgeline._native", reason="the native module is not built")
from native_steps import CONTEXT, native, schedule, step

from ridgeline import _native
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.program.lower.builder import Builder
from ridgeline.program.op import LOGIT_ROWS, LOGITS, TOKEN_IDS, KvState
from ridgeline.program.ops.attention import AttentionAttrs, CacheWriteAttrs, RopeAttrs
from ridgeline.program.ops.dense import (
    ActivationAttrs,
    AddRowAttrs,
    EmbedAttrs,
    ScaleAttrs,
    SliceAttrs,
    SplitHeadsAttrs,
)
from ridgeline.program.passes.fuse import fuse
from ridgeline.spec import families
from ridgeline.spec.spec import LayerNorm, RmsNorm, Rope

LEVELS = _native.runnable_levels()
HIDDEN, VOCAB = 40, 61
ERROR = 1e-5  # of the largest logit

SPEC = families.read_spec(
    {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": CONTEXT,
    }
)


def program_of(body):
    """The program embed -> body -> head."""
    b = Builder(replace(SPEC, layers=()), CONTEXT)
    (x,) = b.emit("embed", "embed", (TOKEN_IDS,), (b.weight("embed.weight", VOCAB, HIDDEN),), EmbedAttrs(1.0))
    (x,) = b.emit("select_rows", "rows", (body(b, x), LOGIT_ROWS))
    b.emit("lm_head", LOGITS, (x,), (b.weight("head.weight", VOCAB, b.width(x)),))
    return b.program()


def check(program, level):
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        for name, shape in program.weights.items()
    }
    ids = torch.randint(VOCAB, (3, CONTEXT - 2), generator=generator)
    expected = dense_logits(program, weights, ids)
    executable = native(program, weights, level)
    for spans in schedule(ids.numpy(), np.random.default_rng(1)):
        logits = torch.from_numpy(executable.run(step(program, spans)).logits_RV)
        rows = torch.cat([expected[s, start : start + len(span)] for s, start, span in spans])
        assert (logits - rows).abs().max() <= ERROR * expected.abs().max()


def attend(heads, kv_heads, dim, turn, *, norm=None, fused=False):
    """Attention over linears of its own, or over slices of one linear; `turn` rotates queries and keys."""

    def body(b, x):
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        if fused:
            qkv = b.linear("qkv", x, sum(sizes), bias=True)
            parts = [
                b.emit("slice", f"{name}.part", (qkv,), (), SliceAttrs(sum(sizes[:at]), size))[0]
                for at, (name, size) in enumerate(zip("qkv", sizes))
            ]
        else:
            parts = [b.linear(name, x, size, bias=True) for name, size in zip("qkv", sizes)]
        q, k, v = (
            b.emit("split_heads", f"{name}.heads", (part,), (), SplitHeadsAttrs(b.width(part) // dim))[0]
            for name, part in zip("qkv", parts)
        )
        if norm:
            q, k = b.norm("q_norm", norm, q), b.norm("k_norm", norm, k)
        q, k = turn(b, "q", q), turn(b, "k", k)
        state = b.state(KvState(kv_heads, dim, None))
        b.emit("kv_write", "write", (k, v), (), CacheWriteAttrs(state))
        (o,) = b.emit("attention", "attend", (q, k, v), (), AttentionAttrs(state, dim**-0.5))
        return b.linear("o", o, HIDDEN, bias=False)

    return body


def turning(attrs, dim):
    def turn(b, name, x):
        cos, sin = b.rope_angles(Rope(100.0, dim))
        return b.emit("rope", f"{name}.rope", (x, cos, sin), (), attrs)[0]

    return turn


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "turned", "offset"), [(20, 20, 0), (24, 8, 0), (24, 16, 8), (72, 66, 3)])
def test_rope(level, fused, interleaved, dim, turned, offset):
    attrs = RopeAttrs(interleaved, offset)
    program = program_of(attend(3, 1, dim, turning(attrs, turned), fused=fused))
    assert ("norm_qkv" in {group.kind for group in fuse(program)}) != fused
    check(program, level)


def test_queries_and_keys_that_turn_differently_are_no_group():
    def turn(b, name, x):
        return turning(RopeAttrs(interleaved=name == "q"), 8)(b, name, x)

    program = program_of(attend(2, 2, 8, turn))
    assert "norm_qkv" not in {group.kind for group in fuse(program)}
    check(program, LEVELS[-1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "norm",
    [LayerNorm(1e-5, per_head=True), LayerNorm(1e-5, bias=False, per_head=True), LayerNorm(1e-5, bias=False),
     RmsNorm(1e-5)],
)  # fmt: skip
def test_norms_of_heads(level, fused, norm):
    check(program_of(attend(3, 1, 20, turning(RopeAttrs(), 20), norm=norm, fused=fused)), level)


@pytest.mark.parametrize("level", LEVELS)
def test_one_row_of_a_table_is_added_to_all(level):
    def body(b, x):
        (x,) = b.emit("add_row", "sum", (x,), (b.weight("table", 3, HIDDEN),), AddRowAttrs(1))
        return attend(2, 1, 8, lambda b, name, x: x)(b, x)

    check(program_of(body), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reader", ["linear", "norm_linear", "activation", "gate", "add", "scale", "norm", "slice"])
def test_readers_of_slices(level, reader):
    """Every instruction reads columns in the middle of a buffer as it would a buffer, and leaves the others alone."""

    def body(b, x):
        wide = b.linear("wide", x, 103, bias=False)
        (y,) = b.emit("slice", "y", (wide,), (), SliceAttrs(3, HIDDEN))
        (z,) = b.emit("slice", "z", (wide,), (), SliceAttrs(60, HIDDEN))
        match reader:
            case "linear":
                (out,) = b.emit("add", "sum", (y, b.linear("down", z, HIDDEN, bias=True)))
            case "norm_linear":
                up = b.linear("up", b.norm("norm", LayerNorm(1e-5, bias=False), y), HIDDEN, bias=True)
                (out,) = b.emit("activation", "act", (up,), (), ActivationAttrs("relu2"))
            case "activation":
                (out,) = b.emit("activation", "act", (y,), (), ActivationAttrs("quick_gelu"))
            case "gate":
                (out,) = b.emit("gated_activation", "act", (y, z), (), ActivationAttrs("sigmoid"))
            case "add":
                (out,) = b.emit("add", "sum", (y, z))
            case "scale":
                (out,) = b.emit("scale", "scaled", (y,), (), ScaleAttrs(-2.5))
            case "norm":
                out = b.norm("norm", RmsNorm(1e-5), z)
            case _:
                (out,) = b.emit("slice", "of", (z,), (), SliceAttrs(5, 7))
        (rest,) = b.emit("slice", "rest", (wide,), (), SliceAttrs(50, b.width(out)))
        (out,) = b.emit("add", "out", (out, rest))
        return attend(1, 1, 8, turning(RopeAttrs(), 8))(b, out)  # a program without keys and values has no cache

    check(program_of(body), level)
