"""Groups of ops: complete, executable, the same computation, and the kinds that every family should have."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import tiny_config
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.program.lower import lower
from ridgeline.program.op import LOGITS, STEP_INPUTS, Op, Program
from ridgeline.program.passes.fuse import GROUP_KINDS, fuse
from ridgeline.spec import families
from ridgeline.spec.spec import (
    DecoderSpec,
    GatedMlp,
    GroupedQueryAttention,
    Layer,
    LayerNorm,
    Mlp,
    ParallelLayer,
    RmsNorm,
)

CONTEXT = 12
every_family = pytest.mark.parametrize("name", families.names())


def tiny_spec(name: str, seed: int = 0) -> DecoderSpec:
    return families.read_spec(tiny_config(name, seed))


def tiny_program(name: str, seed: int = 0) -> Program:
    return lower(tiny_spec(name, seed), CONTEXT)


def flattened(program: Program) -> tuple[Op, ...]:
    return tuple(op for group in fuse(program) for op in group.ops)


def kinds_of_layer(program: Program, number: int) -> list[str]:
    return [group.kind for group in fuse(program) if group.label.startswith(f"layers.{number}.")]


def check_order(program: Program) -> None:
    """Every op once; nothing is read before it is made, no cache read before its state is written."""
    ops = flattened(program)
    assert Counter(op.label for op in ops) == Counter(op.label for op in program.ops)
    made, written = set(STEP_INPUTS), set()
    for op in ops:
        assert made.issuperset(op.inputs), op.label
        made.update(op.outputs)
        if op.kind == "kv_write":
            written.add(op.attrs.state)
        if op.kind == "attention":
            assert op.attrs.state in written


def check_inner_values_stay_inside(program: Program) -> None:
    """What leaves a group is made by its last op, or by one of many linears, or is read by the attention prepared."""
    groups = fuse(program)
    group_of = {op.label: index for index, group in enumerate(groups) for op in group.ops}
    for index, group in enumerate(groups):
        inner = group.ops[:-1]
        if group.kind == "norm_linears":
            inner = tuple(op for op in group.ops if op.kind != "linear")
        made = {name for op in inner for name in op.outputs} - {LOGITS}
        outside = [op for op in program.ops if made.intersection(op.inputs) and group_of[op.label] != index]
        assert all(group.kind == "norm_qkv" and op.kind == "attention" for op in outside), group


@every_family
def test_every_op_is_in_one_group_and_the_order_can_run(name):
    for seed in range(10):
        program = tiny_program(name, seed)
        check_order(program)
        check_inner_values_stay_inside(program)


@every_family
def test_groups_compute_what_the_program_computes(name):
    program = tiny_program(name)
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for key, shape in program.weights.items()
    }
    tokens_BT = torch.randint(program.vocab_size, (2, CONTEXT), generator=generator)
    regrouped = replace(program, ops=flattened(program))
    assert torch.equal(dense_logits(regrouped, weights, tokens_BT), dense_logits(program, weights, tokens_BT))


PLAIN = ["norm_qkv", "attention", "linear_add", "norm_gated", "linear_add"]
NORM_KINDS = {RmsNorm: "rmsnorm", LayerNorm: "layernorm"}


def kinds_of(layer) -> list[str]:
    """What a layer of attention and a dense feed-forward should become: nothing is left alone, but for norms that two
    groups read and norms behind a block."""
    queries = "norm_qkv" if layer.mixer.kv_from is None else "norm_q"
    inward = "norm_gated" if isinstance(layer.feed_forward, GatedMlp) else "norm_activated"
    if isinstance(layer, ParallelLayer):
        shared = [] if layer.ffn_norm else [NORM_KINDS[type(layer.mixer_norm)]]
        return [*shared, queries, "attention", "linear_add", inward, "linear_add"]
    scale = [] if layer.residual_scale == 1.0 else ["scale"]
    after = [
        ["linear", *([NORM_KINDS[type(norm)]] if norm else []), *scale, "add"] if norm or scale else ["linear_add"]
        for norm in (layer.mixer_post_norm, layer.ffn_post_norm)
    ]
    return [queries, "attention", *after[0], inward, *after[1]]


def kinds_outside(spec: DecoderSpec) -> Counter[str]:
    """What there should be before and after the layers."""
    kinds = ["embed", "norm_head"]
    if spec.embedding.num_positions:
        kinds += ["embed", "add"]
    if spec.embedding.norm:
        kinds.append(NORM_KINDS[type(spec.embedding.norm)])
    if spec.head.scale != 1.0:
        kinds += ["select_rows", NORM_KINDS[type(spec.final_norm)], "scale"]
    return Counter(kinds)


def is_dense(layer) -> bool:
    return (
        isinstance(layer, (Layer, ParallelLayer))
        and isinstance(layer.mixer, GroupedQueryAttention)
        and not layer.mixer.output_gate
        and isinstance(layer.feed_forward, (GatedMlp, Mlp))
    )


@every_family
def test_kinds_of_every_family(name):
    spec = tiny_spec(name)
    program = lower(spec, CONTEXT)
    groups = fuse(program)
    for number, layer in enumerate(spec.layers):
        if is_dense(layer):
            assert kinds_of_layer(program, number) == kinds_of(layer)
    if spec.head is not None:
        outside = Counter(group.kind for group in groups if not group.label.startswith("layers."))
        num_ropes = sum(op.kind == "rope_angles" for op in program.ops)
        assert outside - Counter(rope_angles=num_ropes) == kinds_outside(spec)
    for group in groups:
        assert group.kind in GROUP_KINDS or (len(group.ops) == 1 and group.kind == group.ops[0].kind)
    assert len({(group.kind, group.label) for group in groups}) == len(groups)


MAMBA = ["norm_linears", "causal_conv", "norm_linears", "linear", "selective_scan", "gated_activation", "linear_add"]
MAMBA2 = ["norm_linears", *["causal_conv", "split_heads"] * 3, "ssd", "gated_norm", "linear_add"]


@pytest.mark.parametrize(("name", "kinds"), [("mamba", MAMBA), ("mamba2", MAMBA2)])
def test_linears_of_the_same_input(name, kinds):
    program = tiny_program(name)
    assert kinds_of_layer(program, 0) == kinds
    first = next(group for group in fuse(program) if group.kind == "norm_linears")
    assert first.ops[0].kind == "rmsnorm"
    assert len({op.inputs for op in first.ops[1:]}) == 1


def test_parts_of_a_group():
    groups = {group.label: [op.label for op in group.ops] for group in fuse(tiny_program("qwen3"))}
    at = "layers.0.attn"
    assert groups[f"{at}.q"] == [
        "layers.0.mixer_norm",
        *(f"{at}.q", f"{at}.q.heads", f"{at}.q_norm", f"{at}.q.rope"),
        *(f"{at}.k", f"{at}.k.heads", f"{at}.k_norm", f"{at}.k.rope"),
        *(f"{at}.v", f"{at}.v.heads", f"{at}.kv_write"),
    ]
    assert groups[f"{at}.o"] == [f"{at}.o", "layers.0.mixer_sum"]
    gated = ["layers.0.ffn_norm", "layers.0.ffn.gate", "layers.0.ffn.up", "layers.0.ffn.act"]
    assert groups["layers.0.ffn.gate"] == gated
    assert groups["logits"] == ["rows", "final_norm", "logits"]
    softcapped = {group.label: group for group in fuse(tiny_program("gemma2"))}["head"]
    assert [op.kind for op in softcapped.ops] == ["select_rows", "rmsnorm", "lm_head", "softcap"]


def with_reader(program: Program, value: str) -> Program:
    """The program with one more op that reads `value`, at its end."""
    reader = Op("activation", "spy", (value,), ("spy",), (), program.ops[-1].attrs)
    shapes = {**program.shapes, "spy": program.shapes[value]}
    return replace(program, ops=(*program.ops, reader), shapes=shapes)


@pytest.mark.parametrize(
    ("value", "remains"),
    [
        ("layers.0.mixer_norm", ["rmsnorm", *PLAIN]),
        ("layers.0.attn.o", ["norm_qkv", "attention", "linear", "add", *PLAIN[3:]]),
        ("layers.0.ffn_norm", [*PLAIN[:3], "rmsnorm", *PLAIN[3:]]),
        ("layers.0.ffn.act", PLAIN),
        ("layers.0.ffn.down", [*PLAIN[:4], "linear", "add"]),
    ],
)
def test_a_value_that_is_read_elsewhere_stays_outside(value, remains):
    program = with_reader(tiny_program("llama"), value)
    assert kinds_of_layer(program, 0) == remains
    check_order(program)


@every_family
@given(seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_value_read_elsewhere_keeps_groups_closed(name, seed, data):
    """A reader of any value at all: what it reads is never an inner value of a group."""
    program = tiny_program(name, seed)
    value = data.draw(st.sampled_from(sorted(name for op in program.ops for name in op.outputs)))
    program = with_reader(program, value)
    check_order(program)
    check_inner_values_stay_inside(program)


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "gpt2"])
def test_attention_that_reads_another_layers_keys(name):
    """The layer that writes stays as it is; the one that reads has a group of its queries, and no keys and values."""
    spec = tiny_spec(name, seed=next(s for s in range(99) if len(tiny_spec(name, s).layers) > 1))
    layers = [replace(spec.layers[0], mixer=replace(spec.layers[0].mixer, kv_from=source)) for source in (None, 0)]
    program = lower(replace(spec, layers=tuple(layers)), CONTEXT)
    own, shared = (kinds_of_layer(program, number) for number in (0, 1))
    assert own[0] == "norm_qkv"
    assert shared == ["norm_q", *own[1:]]
    assert len(program.states) == 1
    assert not any(name.startswith(("layers.1.attn.k", "layers.1.attn.v")) for name in program.weights)
    check_order(program)
    check_inner_values_stay_inside(program)


def test_residual_of_two_linears_takes_the_later_one():
    program = tiny_program("llama")
    kinds = {op.label: op for op in program.ops}
    add, o = kinds["layers.0.mixer_sum"], kinds["layers.0.attn.o"]
    early = replace(o, label="early", inputs=(program.ops[0].outputs[0],), outputs=("early",))
    ops = tuple(replace(op, inputs=(o.outputs[0], "early")) if op is add else op for op in program.ops)
    both = replace(program, ops=(ops[0], early, *ops[1:]))
    found = {group.label: [op.label for op in group.ops] for group in fuse(both)}
    assert found["layers.0.attn.o"] == ["layers.0.attn.o", "layers.0.mixer_sum"]
    assert found["early"] == ["early"]
    ops = tuple(replace(op, inputs=(o.outputs[0],) * 2) if op is add else op for op in program.ops)
    doubled = replace(program, ops=ops)
    assert kinds_of_layer(doubled, 0)[2:4] == ["linear", "add"]
