"""Paged attention at every ISA level against float64 on the values as stored, and its promises bit by bit.

A row's result must not depend on what shares its step, and nothing that a mask hides may show, not even a NaN.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.quant.kv import SCALED, rotate, rotation_width

native = pytest.importorskip("ridgeline._native", reason="the native kernels are not built")

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
LEVELS = native.runnable_levels()
KINDS = ("f32", "bf16", *SCALED)
EPS = 2.0**-23  # of float32


@dataclass(frozen=True)
class Case:
    """One sequence, its last `length` tokens the queries; the shape of a layer and what it does to the logits."""

    head_dim: int = 64
    kv_heads: int = 1
    group: int = 2
    block_size: int = 16
    kv_length: int = 50
    length: int = 1
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    bidirectional_block: int = 1
    magnitude: float = 1.0
    seed: int = 0
    value_dim: int = 0  # 0: as wide as the keys
    values_in_keys: bool = False  # latents, of floats alone
    float32: bool = False  # bfloat16 multiplied in float32

    @property
    def first_token(self) -> int:
        """The start of the oldest block that a query can see."""
        oldest = self.kv_length - self.length - self.window + 1 if self.window else 0
        return max(0, oldest) // self.block_size * self.block_size


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from((1, 2, 4, 8, 16, 32, 64)))
    edge = block_size * draw(st.integers(1, max(1, 192 // block_size)))
    kv_length = max(1, draw(st.sampled_from((edge - 1, edge, edge + 1, draw(st.integers(1, 300))))))
    head_dim = draw(st.sampled_from((1, 8, 15, 16, 24, 64, 80, 96, 128, 256)))
    return Case(
        head_dim,
        draw(st.integers(1, 2)),
        draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16))),
        block_size,
        kv_length,
        draw(st.integers(1, min(70, kv_length))),
        draw(st.sampled_from((0, 0, 1, 5, 16, 64, 100))),
        draw(st.sampled_from((0.0, 0.0, 20.0))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((1, 1, 2, 7, 1000))),
        draw(st.sampled_from((0.05, 1.0, 8.0))),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from((0, 0, head_dim, (head_dim + 1) // 2, head_dim * 8 // 9 + 1))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


LATENT = Case(576, 1, 16, 16, 150, 3, value_dim=512, values_in_keys=True)  # DeepSeek-V2's and V3's


@dataclass
class Sequence:
    """A case's cache, in which every slot held NaN before, its blocks in any order."""

    case: Case
    level: str
    kind: str
    spare_blocks: int = 2
    state: Any = field(init=False)
    table: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        case, rng = self.case, np.random.default_rng(self.case.seed)
        num_blocks = -(-case.kv_length // case.block_size)
        total = num_blocks + self.spare_blocks
        value_dim, self.in_keys = case.value_dim or case.head_dim, case.values_in_keys and self.kind not in SCALED
        self.state = native.KvState(
            self.level, self.kind, case.kv_heads, case.head_dim, case.block_size, total, value_dim, self.in_keys
        )
        every = np.arange(total * case.block_size)
        poison = np.full((len(every), case.kv_heads, case.head_dim), np.nan, np.float32)
        self.state.write(every, poison, poison[..., :value_dim].copy())
        blocks = rng.permutation(total)[:num_blocks]
        positions = np.arange(case.first_token, case.kv_length)
        self.slots = blocks[positions // case.block_size] * case.block_size + positions % case.block_size
        k, v = rng.standard_normal((2, len(positions), case.kv_heads, case.head_dim), np.float32)
        self.state.write(self.slots, k, v[..., :value_dim].copy())
        self.table = blocks[case.first_token // case.block_size :].astype(np.int64)
        heads = case.kv_heads * case.group
        self.q = rng.standard_normal((case.length, heads, case.head_dim), np.float32) * np.float32(case.magnitude)
        self.sinks = rng.standard_normal(heads, np.float32) if case.has_sinks else None
        self.slopes = np.float32(2.0) ** -np.arange(1, heads + 1, dtype=np.float32) if case.has_slopes else None
        self.scale = case.head_dim**-0.5

    def attend(self, *, splits: int = 1, rows_per_call: int = 0, length: int | None = None, first: int = 0) -> Floats:
        """Rows [first, first + length) of the queries, run as a span of their own."""
        case = self.case
        length = case.length - first if length is None else length
        out = self.state.attend(
            self.q,
            first_row=first,
            length=length,
            kv_length=case.kv_length - case.length + first + length,
            table=self.table,
            first_token=case.first_token,
            bidirectional_block=case.bidirectional_block,
            scale=self.scale,
            window=case.window,
            softcap=case.softcap,
            sinks=self.sinks,
            slopes=self.slopes,
            float32=case.float32,
            splits=splits,
            rows_per_call=rows_per_call,
        )
        return out[first : first + length]

    def expected(self) -> tuple[Doubles, Doubles]:
        """The result in float64, and how far a correct one may be from it."""
        case = self.case
        k, v = (x.astype(np.float64) for x in self.state.read(self.slots))
        v = k[..., : v.shape[-1]] if self.in_keys else v
        q = to_bf16(self.q) if self.kind == "bf16" else self.q
        q_THD, heads = q.astype(np.float64), np.arange(case.kv_heads * case.group) // case.group
        k_SHD, v_SHD = k[:, heads], v[:, heads]
        logits = np.einsum("thd,shd->ths", q_THD, k_SHD) * self.scale
        error = self._error_of_scores(q_THD, k_SHD)
        if case.softcap:
            logits = case.softcap * np.tanh(logits / case.softcap)
            error = error + 8 * EPS * case.softcap
        query = np.arange(case.kv_length - case.length, case.kv_length)[:, None]
        key = np.arange(case.first_token, case.kv_length)[None]
        if self.slopes is not None:
            gain = self.slopes[None, :, None] * (key - query)[:, None]
            logits = logits + gain
            error = error + EPS * np.abs(gain)
        start = case.kv_length - case.length
        seen = key < start + ((query - start) // case.bidirectional_block + 1) * case.bidirectional_block
        if case.window:
            seen = seen & (key > query - case.window)
        logits = np.where(seen[:, None], logits, -np.inf)
        most = logits.max(-1, keepdims=True)
        if self.sinks is not None:
            most = np.maximum(most, self.sinks[None, :, None])
        weights = np.exp(logits - most)
        total = weights.sum(-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[None, :, None] - most)
        weights = weights / total
        out = np.einsum("ths,shd->thd", weights, v_SHD)
        return out, self._bound(weights, v_SHD, np.where(seen[:, None], error, 0).max(-1))

    def _error_of_scores(self, q_THD: Doubles, k_SHD: Doubles) -> Doubles:
        """How far q . k may be from exact: sums in float32 of rounded queries, for int4 those of rotated heads."""
        length = np.abs(q_THD).sum(-1)[:, :, None]
        if self.kind == "int4":
            q_THD, k_SHD = rotate(q_THD), rotate(k_SHD) / rotation_width(self.case.head_dim)
        products = np.einsum("thd,shd->ths", np.abs(q_THD), np.abs(k_SHD))
        error = EPS * (self.case.head_dim + 8) * products
        entries = np.abs(k_SHD).sum(-1).T[None]
        if self.kind in ("int8", "int4"):  # queries are rounded to 16 bits
            error += np.abs(q_THD).max(-1)[:, :, None] * 2**-16 * entries * 1.01
        if self.kind == "int4":  # 8 sums of two for each entry
            error += 8 * EPS * length * entries
        if self.kind == "fp8":  # they may be rounded to bfloat16
            error += 2**-8 * products
        return error * self.scale

    def _bound(self, weights: Doubles, v_SHD: Doubles, error_TH: Doubles) -> Doubles:
        tokens = v_SHD.shape[0]
        rounding = 2**-8 if self.kind in ("bf16", "fp8") else 0.0
        relative = 2.5 * error_TH + rounding + EPS * (tokens + 64)
        width = rotation_width(v_SHD.shape[-1]) if self.kind == "int4" else 1
        if self.kind == "int4":
            v_SHD = rotate(v_SHD)
        bound = relative[:, :, None] * np.einsum("ths,shd->thd", weights, np.abs(v_SHD)) * 1.1
        if self.kind in ("int8", "int4"):  # weights times scales are rounded to 16 bits around their largest
            bound += ((weights * np.abs(v_SHD).max(-1).T[None]).max(-1) * tokens * 2**-16)[:, :, None]
        # an entry has its share of all that were rotated with it
        blocks = bound.reshape(*bound.shape[:-1], -1, width)
        return np.broadcast_to(blocks.mean(-1, keepdims=True), blocks.shape).reshape(bound.shape) + 1e-30


def to_bf16(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def check(sequence: Sequence, got: Floats) -> None:
    want, bound = sequence.expected()
    excess = np.abs(got - want) - bound
    assert (excess <= 0).all(), f"{np.nanmax(excess / bound) + 1:.3g} times the bound: {sequence.case}"


every_kind = pytest.mark.parametrize("kind", KINDS)
every_level = pytest.mark.parametrize("level", LEVELS)


@every_kind
@every_level
@settings(max_examples=40, deadline=None)
@given(case=cases(), splits=st.integers(1, 9))
def test_matches_float64_on_the_stored_values(level: str, kind: str, case: Case, splits: int) -> None:
    sequence = Sequence(case, level, kind)
    check(sequence, sequence.attend(splits=splits))


@every_kind
@every_level
@settings(max_examples=25, deadline=None)
@given(case=cases(), data=st.data())
def test_a_row_is_the_same_whatever_is_computed_with_it(level: str, kind: str, case: Case, data: st.DataObject) -> None:
    sequence = Sequence(case, level, kind)
    whole = sequence.attend()
    rows = data.draw(st.integers(1, case.length))
    np.testing.assert_array_equal(sequence.attend(rows_per_call=rows).view(np.uint32), whole.view(np.uint32))
    if (
        case.bidirectional_block == 1
    ):  # as a chunk of its own, and one token at a time: then later tokens are no part of the span
        first = data.draw(st.integers(0, case.length - 1))
        length = data.draw(st.sampled_from((1, case.length - first)))
        part = sequence.attend(first=first, length=length)
        np.testing.assert_array_equal(part.view(np.uint32), whole[first : first + length].view(np.uint32))


@every_kind
@every_level
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 256])
def test_every_length_around_the_tiles(level: str, kind: str, block_size: int) -> None:
    for kv_length in (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193):
        case = Case(32, 1, 3, block_size, kv_length, min(kv_length, 9), seed=kv_length)
        sequence = Sequence(case, level, kind)
        check(sequence, sequence.attend())


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@every_level
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_latents_are_keys_and_values_at_once(level: str, kind: str, block_size: int) -> None:
    for kv_length, length in ((1, 1), (17, 3), (64, 1), (150, 7)):
        sequence = Sequence(replace(LATENT, block_size=block_size, kv_length=kv_length, length=length), level, kind)
        entry_bytes = 4 if kind == "f32" else 2
        assert sequence.state.block_bytes == max(block_size, 16) * 576 * entry_bytes
        whole = sequence.attend()
        check(sequence, whole)
        check(sequence, sequence.attend(splits=3))
        np.testing.assert_array_equal(sequence.attend(rows_per_call=1).view(np.uint32), whole.view(np.uint32))


@every_kind
@every_level
def test_sequences_share_blocks(level: str, kind: str) -> None:
    """The second sequence continues the first's two full blocks; its own token must not disturb the first."""
    case = Case(48, 2, 2, 16, 40, 3)
    first = Sequence(case, level, kind)
    before = first.attend()
    free = next(b for b in range(5) if b not in first.table)
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 8, 2, 48), np.float32)
    second = Sequence(case, level, kind)
    second.state = first.state
    second.table = np.asarray([*first.table[:2], free])
    second.slots = np.concatenate([first.slots[:32], free * 16 + np.arange(8)])
    first.state.write(second.slots[32:], k, v)
    check(second, second.attend())
    np.testing.assert_array_equal(first.attend(), before)
    first.state.copy_block(int(first.table[2]), free)
    np.testing.assert_array_equal(second.attend(), before)


@every_kind
@every_level
def test_a_query_that_is_nan_stays_alone(level: str, kind: str) -> None:
    sequence = Sequence(Case(64, 1, 4, 16, 70, 20), level, kind)
    want = sequence.attend()
    sequence.q[7, 2, 5] = np.nan
    got = sequence.attend()
    assert np.isnan(got[7, 2]).all()
    want[7, 2] = got[7, 2] = 0
    np.testing.assert_array_equal(got, want)


@every_kind
@every_level
@pytest.mark.parametrize("of_keys", [True, False])
def test_a_token_that_is_nan_is_seen_by_later_tokens_only(level: str, kind: str, of_keys: bool) -> None:
    sequence = Sequence(Case(64, 1, 2, 16, 100, 100), level, kind)
    want = sequence.attend()
    x = np.ones((1, 1, 64), np.float32)
    nan = x * np.float32(np.nan)
    sequence.state.write(sequence.slots[80:81], nan if of_keys else x, x if of_keys else nan)
    got = sequence.attend()
    assert np.isnan(got[80:]).all()
    np.testing.assert_array_equal(got[:64], want[:64])


@every_kind
@every_level
def test_hidden_parts_merge_to_nothing(level: str, kind: str) -> None:
    """A window leaves most of the splits without a visible key."""
    sequence = Sequence(Case(64, 1, 2, 16, 300, 2, window=20), level, kind)
    for splits in (2, 3, 7):
        check(sequence, sequence.attend(splits=splits))


@every_kind
@every_level
@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
def test_sinks_far_from_the_logits(level: str, kind: str, logit: float) -> None:
    sequence = Sequence(Case(64, 1, 2, 16, 100, 5, has_sinks=True), level, kind)
    sequence.sinks = np.asarray([logit, -logit], np.float32)
    for splits in (1, 4):
        check(sequence, sequence.attend(splits=splits))


@every_kind
def test_levels_agree(kind: str) -> None:
    """All levels are the same function up to rounding."""
    case = Case(96, 2, 4, 32, 200, 17)
    results = [Sequence(case, level, kind).attend() for level in LEVELS]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=2**-7, atol=2**-9)


def test_wrong_arguments_are_refused() -> None:
    sequence = Sequence(Case(), LEVELS[0], "f32")
    with pytest.raises(ValueError, match="not in the cache"):
        sequence.table = sequence.table + 1000
        sequence.attend()
    with pytest.raises(ValueError, match="table is too short"):
        sequence.table = np.zeros(1, np.int64)
        sequence.attend()
    with pytest.raises(ValueError, match="splits"):
        Sequence(Case(), LEVELS[0], "f32").attend(splits=0)
