"""Groups of ops: complete, executable, the same computation, and the kinds that every family should have."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.backends.reference import dense_logits
from ridgeline.program.lower import lower
from ridgeline.program.op import LOGITS, STEP_INPUTS, Op, Program
from ridgeline.program.passes.fuse import GROUP_KINDS, fuse
from ridgeline.spec import families

CONTEXT = 12
every_family = pytest.mark.parametrize("name", families.names())


def tiny_program(name: str, seed: int = 0) -> Program:
    rng = Random(f"{name} {seed}")
    return lower(families.read_spec(families.family(name).tiny(lambda *options: rng.choice(options))), CONTEXT)


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
    """What leaves a group is made by its last op, or is read by the attention that the group prepares."""
    groups = fuse(program)
    group_of = {op.label: index for index, group in enumerate(groups) for op in group.ops}
    for index, group in enumerate(groups):
        made = {name for op in group.ops[:-1] for name in op.outputs} - {LOGITS}
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
ACTIVATED = ["norm_qkv", "attention", "linear_add", "norm_activated", "linear_add"]
LAYER_KINDS = {
    "bloom": ACTIVATED,
    "falcon": ["layernorm", *ACTIVATED],  # parallel: the norm has two readers
    "gpt_bigcode": ACTIVATED,
    "gpt_neox": ACTIVATED,
    "phi": ["layernorm", *ACTIVATED],
    "gemma2": ["norm_qkv", "attention", "linear", "rmsnorm", "add", "norm_gated", "linear", "rmsnorm", "add"],
    "gpt2": ACTIVATED,
}
SINGLES = {
    "gpt2": Counter(embed=2, add=1),
    "gpt_bigcode": Counter(embed=2, add=1),
    "bloom": Counter(embed=1, layernorm=1),
}


@every_family
def test_kinds_of_every_family(name):
    """Nothing of a layer is left alone, but for the norms that gemma2 has behind its sums."""
    program = tiny_program(name)
    groups = fuse(program)
    for number in range(len(program.states)):
        assert kinds_of_layer(program, number) == LAYER_KINDS.get(name, PLAIN)
    outside = Counter(group.kind for group in groups if not group.label.startswith("layers."))
    num_ropes = sum(op.kind == "rope_angles" for op in program.ops)
    assert outside - Counter(rope_angles=num_ropes) == SINGLES.get(name, Counter(embed=1)) + Counter(norm_head=1)
    for group in groups:
        assert group.kind in GROUP_KINDS or (len(group.ops) == 1 and group.kind == group.ops[0].kind)
    assert len({(group.kind, group.label) for group in groups}) == len(groups)


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


def test_attention_that_reads_another_layers_keys():
    """A second attention to the same state leaves the group whole; its own queries are ops of their own."""
    program = tiny_program("llama")
    first = next(op for op in program.ops if op.kind == "attention")
    q = next(op for op in program.ops if op.kind == "attention" and op is not first).inputs[0]
    second = replace(first, label="second", inputs=(q, *first.inputs[1:]), outputs=("second",))
    shared = replace(program, ops=(*program.ops, second), shapes={**program.shapes, "second": program.shapes[LOGITS]})
    assert kinds_of_layer(shared, 0) == PLAIN
    assert "norm_qkv" not in kinds_of_layer(shared, 1)
    check_order(shared)


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
