"""The op table, its reference functions in torch, and the two executors of the reference backend hold together.

A new op gets a row in OPSET, a function in REFERENCE_OPS and a case here or in an `op_cases_<area>.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_case import Case, nbytes
from tiny_models import relative_error

from families import tiny_config
from ridgeline.backends.reference.dense import DenseMemory, dense_logits
from ridgeline.backends.reference.interpreter import REFERENCE_OPS
from ridgeline.backends.reference.paged import ReferenceExecutable
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.cache.layout import KvStateSize, RecurrentStateSize, plan_layout
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import BlockTable, Span, StepPlan
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import BatchBuilder
from ridgeline.program.lower import lower
from ridgeline.program.op import Plain, RecurrentState
from ridgeline.program.ops.attention import AttentionAttrs, CacheWriteAttrs, RopeAnglesAttrs, RopeAttrs
from ridgeline.program.ops.dense import (
    ActivationAttrs,
    AddRowAttrs,
    EmbedAttrs,
    NormAttrs,
    ScaleAttrs,
    SliceAttrs,
    SoftcapAttrs,
    SplitHeadsAttrs,
)
from ridgeline.program.opset import OPSET
from ridgeline.program.pricing import ElementBytes, Load, Operands
from ridgeline.spec import families
from ridgeline.spec.spec import Activation

SEEDS = range(8)
CONTEXT = 40


def embed(rng: Random) -> Case:
    rows = rng.randint(1, 9)
    return Case(EmbedAttrs(rng.choice([1.0, 5.5])), [("T",)], [(rows, rng.randint(1, 7))], below={0: rows})


def rmsnorm(rng: Random) -> Case:
    width = rng.randint(2, 7)
    shape = rng.choice([("T", width), ("T", rng.randint(1, 3), width)])
    return Case(NormAttrs(1e-3, unit_offset=rng.random() < 0.5), [shape], [(width,)] * rng.randint(0, 2))


def layernorm(rng: Random) -> Case:
    shape = ("T", *rng.choice([(), (rng.randint(1, 3),)]), rng.randint(2, 7))
    weight = rng.choice([shape[-1:], shape[1:]])
    return Case(NormAttrs(1e-3, unit_offset=rng.random() < 0.5), [shape], [weight] * rng.randint(1, 2))


def linear(rng: Random, rows: str = "T") -> Case:
    wide, tall = rng.randint(1, 7), rng.randint(1, 7)
    return Case(Plain(), [(rows, wide)], [(tall, wide), (tall,)][: rng.randint(1, 2)])


def concat(rng: Random) -> Case:
    return Case(Plain(), [("T", rng.randint(1, 7)), ("T", rng.randint(1, 7))])


def split_heads(rng: Random) -> Case:
    heads = rng.randint(1, 4)
    return Case(SplitHeadsAttrs(heads), [("T", heads * rng.randint(1, 5))])


def rope_angles(rng: Random) -> Case:
    frequencies = tuple(rng.random() for _ in range(rng.randint(1, 5)))
    return Case(RopeAnglesAttrs(frequencies, rng.choice([1.0, 1.2])), [("T",)], below={0: 50})


def rope(rng: Random) -> Case:
    half = rng.randint(1, 4)
    attrs = RopeAttrs(rng.choice([False, True]), rng.choice([0, 3]))
    dim = attrs.offset + 2 * half + rng.choice([0, 3])
    return Case(attrs, [("T", rng.randint(1, 3), dim), ("T", half), ("T", half)], float32={1, 2})


def kv_write(rng: Random) -> Case:
    shape = ("T", rng.randint(1, 3), rng.randint(1, 4))
    return Case(CacheWriteAttrs(0), [shape, shape])


def attention(rng: Random) -> Case:
    kv_heads, dim = rng.randint(1, 2), rng.randint(1, 4)
    heads = kv_heads * rng.randint(1, 3)
    slopes = rng.choice([None, tuple(rng.random() for _ in range(heads))])
    attrs = AttentionAttrs(0, 0.7, rng.choice([None, 1, 3]), rng.choice([None, 2.0]), slopes)
    kv_shape = ("T", kv_heads, dim)
    return Case(attrs, [("T", heads, dim), kv_shape, kv_shape], [(heads,)][: rng.randint(0, 1)])


def slice_columns(rng: Random) -> Case:
    attrs = SliceAttrs(rng.randint(0, 3), rng.randint(1, 4))
    return Case(attrs, [("T", attrs.offset + attrs.size + rng.randint(0, 2))])


def scale(rng: Random) -> Case:
    return Case(ScaleAttrs(0.7), [("T", rng.randint(1, 7))])


def add(rng: Random) -> Case:
    shape = ("T", rng.randint(1, 7))
    return Case(Plain(), [shape, shape])


def add_row(rng: Random) -> Case:
    rows, width = rng.randint(1, 3), rng.randint(1, 7)
    return Case(AddRowAttrs(rng.randrange(rows)), [("T", width)], [(rows, width)])


def activation(rng: Random) -> Case:
    return Case(ActivationAttrs(rng.choice(get_args(Activation))), [("T", rng.randint(1, 7))])


def gated_activation(rng: Random) -> Case:
    return Case(activation(rng).attrs, add(rng).inputs)


def select_rows(rng: Random) -> Case:
    return Case(Plain(), [("T", rng.randint(1, 7)), ("R",)], below={1: "T"})


def lm_head(rng: Random) -> Case:
    return linear(rng, "R")


def softcap(rng: Random) -> Case:
    return Case(SoftcapAttrs(2.0), [("R", rng.randint(1, 7))], float32={0})


CASES: dict[str, Callable[[Random], Case]] = {
    case.__name__.removesuffix("_columns"): case
    for case in (
        embed, rmsnorm, layernorm, linear, split_heads, slice_columns, scale, concat, rope_angles, rope, kv_write,
        attention, add, add_row, activation, gated_activation, select_rows, lm_head, softcap,
    )
}  # fmt: skip
for area in sorted(Path(__file__).parent.glob("op_cases_*.py")):
    CASES.update(import_module(area.stem).CASES)


@dataclass
class Call:
    """A case with concrete sizes and tensors."""

    kind: str
    case: Case
    sizes: dict
    inputs: list
    weights: list

    @classmethod
    def draw(cls, kind: str, seed: int, dtype: torch.dtype) -> "Call":
        rng, generator = Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
        case = CASES[kind](rng)
        tokens = rng.randint(1, 6)
        sizes = {"T": tokens, "R": rng.randint(1, tokens)}

        def tensor(shape, index=None):
            shape = concrete(shape, sizes)
            if index in case.below:
                bound = case.below[index]
                return torch.randint(sizes.get(bound, bound), shape, generator=generator)
            x = torch.randn(shape, generator=generator)
            x = x + 0.2 * x.sign()  # away from the kink of relu
            return x.to(torch.float32 if index in case.float32 and dtype != torch.float64 else dtype)

        inputs = [tensor(shape, index) for index, shape in enumerate(case.inputs)]
        weights = [tensor(shape) for shape in case.weights]
        if OPSET[kind].float32_weights and dtype == torch.bfloat16:
            weights = [weight.float() for weight in weights]
        return cls(kind, case, sizes, inputs, weights)

    def run(self, inputs=None, weights=None):
        """The op's outputs. An attention finds its keys and values written, as every program has it."""
        inputs, weights = inputs or self.inputs, weights or self.weights
        kv = DenseMemory(self.case.states, 1, self.sizes["T"])
        if self.kind == "attention":
            REFERENCE_OPS["kv_write"](CacheWriteAttrs(0), inputs[1:], [], kv)
        if self.kind == "latent_attention":
            REFERENCE_OPS["latent_write"](CacheWriteAttrs(0), inputs[1:], [], kv)
        return REFERENCE_OPS[self.kind](self.case.attrs, inputs, weights, kv)


def concrete(shape, sizes):
    return tuple(sizes.get(dim, dim) for dim in shape)


def test_every_row_has_one_meaning_and_one_case():
    assert OPSET.keys() == REFERENCE_OPS.keys() == CASES.keys()


@pytest.mark.parametrize("name", families.names())
def test_lowered_ops_keep_their_signatures(name):
    for seed in SEEDS:
        program = lower(families.read_spec(tiny_config(name, seed)))
        made = {"token_ids", "positions", "logit_rows"}
        for op in program.ops:
            row = OPSET[op.kind]
            assert isinstance(op.attrs, row.attrs)
            assert len(op.inputs) == row.num_inputs
            assert len(op.weights) in row.num_weights
            assert set(op.inputs) <= made, f"{op.label} reads a value before it is made"
            made.update(op.outputs)
        assert {weight for op in program.ops for weight in op.weights} == set(program.weights) - UNUSED
        assert len({op.label for op in program.ops}) == len(program.ops)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", OPSET)
def test_inferred_shapes_are_those_of_the_reference(kind, seed):
    call = Call.draw(kind, seed, torch.float32)
    inferred = OPSET[kind].infer(call.case.attrs, call.case.inputs, call.case.weights)
    assert [concrete(shape, call.sizes) for shape in inferred] == [tuple(out.shape) for out in call.run()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", OPSET)
def test_priced_bytes_are_those_of_the_tensors(kind, seed):
    """In bfloat16, every operand once; look-ups move only the rows that they find."""
    call = Call.draw(kind, seed, torch.bfloat16)
    outputs = call.run()
    cost = OPSET[kind].cost(
        Operands(
            attrs=call.case.attrs,
            inputs=tuple(tuple(x.shape) for x in call.inputs),
            outputs=tuple(tuple(x.shape) for x in outputs),
            weights=tuple(tuple(x.shape) for x in call.weights),
            input_bytes=tuple(x.element_size() for x in call.inputs),
            output_bytes=tuple(4 if OPSET[kind].float32_outputs else 2 for _ in outputs),
            load=Load(((call.sizes["T"], call.sizes["T"]),), call.sizes["R"]),
            element=ElementBytes(weight=4 if OPSET[kind].float32_weights else 2, activation=2, kv=2),
        )
    )
    moved = nbytes([*call.inputs, *outputs, *call.weights])
    if call.case.moved:
        moved = pytest.approx(call.case.moved(call.inputs, outputs, call.weights))
    match kind:
        case "embed":
            moved = nbytes([call.inputs[0], outputs[0], outputs[0]])
        case "add_row":
            moved = nbytes([call.inputs[0], outputs[0], call.weights[0][0]])
        case "select_rows":
            moved = nbytes([call.inputs[1], outputs[0], outputs[0]])
        case "split_heads":
            assert outputs[0].data_ptr() == call.inputs[0].data_ptr()
            moved = 0
        case "slice":
            assert outputs[0].untyped_storage().data_ptr() == call.inputs[0].untyped_storage().data_ptr()
            moved = 0
        case "kv_write":
            moved = 2 * nbytes(call.inputs)
    assert cost.num_bytes == moved
    assert cost.flops >= 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind", sorted(OPSET.keys() - {"rope_angles", "kv_write", "latent_write"})
)  # integers in; nothing out
def test_ops_are_differentiable(kind, seed):
    """Gradients equal finite differences for every float operand; attention's pass through the written keys."""
    call = Call.draw(kind, seed, torch.float64)
    operands = [*call.inputs, *call.weights]
    for x in operands:
        x.requires_grad_(x.is_floating_point())
    split = len(call.inputs)

    def floats(*xs):
        return tuple(y for y in call.run(list(xs[:split]), list(xs[split:])) if y.is_floating_point())

    # Some ops compute in fp32 within: the step and the tolerance are what fp32 resolves.
    assert torch.autograd.gradcheck(floats, operands, eps=1e-3, atol=2e-3, rtol=2e-3)


def test_shapes_that_do_not_fit_are_refused():
    for kind, inputs, weights in (
        ("linear", [("T", 4)], [(3, 5)]),
        ("rmsnorm", [("T", 4)], [(5,)]),
        ("add", [("T", 4), ("T", 5)], []),
    ):
        with pytest.raises(ConfigError):
            OPSET[kind].infer(Plain(), inputs, weights)
    with pytest.raises(ConfigError):
        OPSET["slice"].infer(SliceAttrs(2, 3), [("T", 4)], [])
    with pytest.raises(ConfigError):
        OPSET["rope"].infer(RopeAttrs(offset=1), [("T", 2, 4), ("T", 2), ("T", 2)], [])


UNUSED = {"unused_positions.weight"}  # rows of a checkpoint's table before those of its positions


def random_weights(program, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in program.weights.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = noise / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * noise
    return weights


@pytest.mark.parametrize("name", families.names())
def test_whole_programs_are_differentiable(name):
    """Every weight of the model gets a finite gradient, and the matrices one that is not zero."""
    program = lower(families.read_spec(tiny_config(name, 0)), CONTEXT)
    weights = {name: weight.requires_grad_() for name, weight in random_weights(program, 0).items()}
    tokens_BT = torch.arange(2 * CONTEXT).reshape(2, CONTEXT) % program.vocab_size
    dense_logits(program, weights, tokens_BT).square().mean().backward()
    choosing = {name for op in program.ops if op.kind == "route" for name in op.weights}  # of the choice alone
    routes = [op for op in program.ops if op.kind == "route"]
    lone = [op.inputs[0] for op in routes if op.attrs.routing.normalize and op.attrs.routing.top_k == 1]
    choosing |= {f"{router}.weight" for router in lone}  # what is chosen counts 1
    for name, weight in weights.items():
        if name in choosing | UNUSED:
            continue
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        # Within a window of one token the softmax is 1, whatever the query and the key.
        alone = re.match(r"layers.(\d+).attn.[qk].weight", name)
        assert weight.grad.any() or weight.ndim == 1 or (alone and program.states[int(alone[1])].window == 1), name


def state_size(state):
    if isinstance(state, RecurrentState):
        return RecurrentStateSize(state.num_bytes, state.logged_bytes)
    return KvStateSize(state.bytes_per_token(4), state.window)


class PagedRun:
    """Sequences computed chunk by chunk over the paged cache, in blocks scattered at random.

    With `max_logged` some chunks have tokens behind them that are taken back, up to so many in all.
    """

    def __init__(self, program, weights, rng, sequences, max_logged=0):
        self.rng, self.max_logged, self.vocab_size = rng, max_logged, program.vocab_size
        self.num_logged = [0] * len(sequences)
        self.block_size = rng.choice([1, 4, 16])
        states = [state_size(state) for state in program.states]
        budget_bytes = (
            12
            * CONTEXT
            * sum(s.bytes_per_token if isinstance(s, KvStateSize) else s.sequence_bytes(max_logged) for s in states)
        )  # twice what four sequences need
        self.layout = plan_layout(states, self.block_size, budget_bytes, CONTEXT, CONTEXT, len(sequences), max_logged)
        self.executable = ReferenceExecutable(program, as_arrays(weights), self.layout)
        self.sequences = sequences
        self.blocks = []  # [group][sequence][block]
        for group in self.layout.groups:
            per_sequence = 1 if group.kind == "recurrent" else -(-CONTEXT // self.block_size)
            ids = rng.sample(range(group.num_blocks), per_sequence * len(sequences))
            self.blocks.append([ids[i :: len(sequences)] for i in range(len(sequences))])

    def logits(self):
        """[sequence][T, V], of every position."""
        done = [0] * len(self.sequences)
        logits = [[] for _ in self.sequences]
        step = 0
        while members := [i for i, tokens in enumerate(self.sequences) if done[i] < len(tokens)]:
            members = self.rng.sample(members, self.rng.randint(1, len(members)))
            spans = []
            for i in members:
                size = min(self.rng.choice([1, 1, 2, 7, 20]), len(self.sequences[i]) - done[i])
                tokens = self.sequences[i][done[i] : done[i] + size].tolist()
                room = min(self.max_logged, CONTEXT - done[i]) - size
                drafts = [self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(0, max(room, 0)))]
                spans.append(Span(i, done[i], [*tokens, *drafts], size + len(drafts), num_optional=len(drafts)))
            tables = tuple(
                tuple(self.table(index, group, span) for span in spans)
                for index, group in enumerate(self.layout.groups)
            )
            plan = StepPlan(step, tuple(spans), tables, copies=(), samples=())
            batch = BatchBuilder(self.layout).build(plan, Sampler().sampling_metadata([]))
            rows = torch.from_numpy(self.executable.run(batch).logits_RV.copy())
            for span, part in zip(spans, rows.split([span.num_tokens for span in spans])):
                kept = span.num_tokens - span.num_optional
                logits[span.seq_id].append(part[:kept])
                done[span.seq_id] = span.start + kept
                self.num_logged[span.seq_id] = kept if span.num_optional else 0
            step += 1
        return [torch.cat(parts) for parts in logits]

    def table(self, index, group, span):
        """Blocks that no query of the span sees any more are left out, as the cache frees them."""
        blocks = self.blocks[index][span.seq_id]
        if group.kind == "recurrent":
            return BlockTable(0, blocks, self.num_logged[span.seq_id])
        first = 0 if group.window is None else max(0, span.start - group.window + 1) // self.block_size
        end = -(-span.end // self.block_size)
        return BlockTable(first * self.block_size, blocks[first:end])


@pytest.mark.parametrize("max_logged", [0, 5], ids=["", "drafts"])
@pytest.mark.parametrize("name", families.names())
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None)
def test_paged_equals_dense_over_any_chunking(name, max_logged, seed):
    rng = Random(seed)
    config = tiny_config(name, seed)
    program = lower(families.read_spec(config), CONTEXT)
    weights = random_weights(program, seed % 1000)
    numbers = np.random.default_rng(seed)
    sequences = [numbers.integers(0, program.vocab_size, rng.randint(1, CONTEXT)) for _ in range(rng.randint(1, 4))]
    paged = PagedRun(program, weights, rng, sequences, max_logged).logits()
    for tokens, actual in zip(sequences, paged):
        expected = dense_logits(program, weights, torch.from_numpy(tokens)[None])[0]
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) <= 1e-4, config
