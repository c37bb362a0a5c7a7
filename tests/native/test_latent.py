"""Latent attention in native code: both of its forms, at every level, over any chunking, equal the reference's."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch

pytest.importorskip("ridgeline._native", reason="the native module is not built")
from native_steps import BF16, CONTEXT, F32, step_batch

from ridgeline import _native
from ridgeline.backends.native.executable import NativeExecutable
from ridgeline.backends.native.settings import NativeSettings
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.backends.step import GroupStep, StepBatch
from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.program.lower import lower
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.spec.spec import DecoderSpec, Head, LatentAttention, Layer, RmsNorm, Rope

LEVELS = _native.runnable_levels()
NORM = RmsNorm(1e-6)
SMALL = LatentAttention(3, 40, 24, 8, 20, 0.2, Rope(1e4, 8, interleaved=True), NORM)
DEEPSEEK = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, Rope(1e4, 64, interleaved=True), NORM)


def random_mixer(seed: int) -> LatentAttention:
    rng = Random(seed)
    rope = 2 * rng.choice([1, 4, 9, 32])
    return LatentAttention(
        num_heads=rng.choice([1, 2, 5, 16]),
        kv_rank=rng.choice([8, 31, 64, 200]),
        nope_dim=rng.choice([4, 17, 32, 100]),
        rope_dim=rope,
        value_dim=rng.choice([3, 16, 64, 70]),
        scale=rng.choice([0.1, 0.3]),
        rope=Rope(1e4, rope, interleaved=rng.random() < 0.5),
        norm=NORM,
        q_rank=rng.choice([None, 24]),
        bias=rng.random() < 0.5,
    )


@dataclass
class Model:
    """Two layers of nothing but latent attention, and three sequences of random tokens."""

    mixer: LatentAttention
    context: int = CONTEXT
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        layers = (Layer(self.mixer, None, mixer_norm=NORM),) * 2
        spec = DecoderSpec("latent", 61, 48, self.context, layers, NORM, Head(tied=False))
        self.program = lower(spec)
        generator = torch.Generator().manual_seed(self.seed)
        noise = {name: torch.randn(shape, generator=generator) for name, shape in self.program.weights.items()}
        scaled = {name: x / x.shape[-1] ** 0.5 if x.ndim > 1 else 1 + 0.1 * x for name, x in noise.items()}
        self.weights = {name: x.to(self.dtype) for name, x in scaled.items()}
        self.ids = np.random.default_rng(self.seed).integers(0, 61, (3, self.context))

    def expected(self) -> torch.Tensor:
        """[S, L, V] in float32 arithmetic."""
        exact = {name: weight.float() for name, weight in self.weights.items()}
        return dense_logits(self.program, exact, torch.from_numpy(self.ids))

    def executable(self, level: str, block_size: int, **settings: object) -> NativeExecutable:
        num_blocks = 3 * -(-self.context // block_size)
        state_bytes = sum(state.bytes_per_token(4) for state in self.program.states)
        group = GroupLayout("full", tuple(range(len(self.program.states))), None, state_bytes, num_blocks)
        form, dtype, kv = (BF16, "bfloat16", "bf16") if self.dtype is torch.bfloat16 else (F32, "float32", "f32")
        chosen = {"num_threads": 2, "dtype": dtype, "matrices": form, "head": form, "kv": kv} | settings
        layout = CacheLayout(block_size, (group,), None)
        return NativeExecutable(
            self.program, lambda: as_arrays(self.weights), layout, NativeSettings(level=level, **chosen)
        )

    def run(self, executable: NativeExecutable, block_size: int, seed: int, sizes: tuple[int, ...]) -> torch.Tensor:
        """Logits [S, L, V], the sequences computed in chunks of `sizes` at random."""
        rng = np.random.default_rng(seed)
        out = torch.zeros(*self.ids.shape, 61)
        done = [0, 0, 0]
        while any(at < self.context for at in done):
            chunks = [min(int(rng.choice(sizes)), self.context - at) for at in done]
            spans = [(s, done[s], size) for s, size in enumerate(chunks) if size]
            if not spans:
                continue
            logits = torch.from_numpy(executable.run(self.step(spans, block_size)).logits_RV)
            for s, start, size in spans:
                out[s, start : start + size] = logits[:size]
                logits, done[s] = logits[size:], start + size
        return out

    def step(self, spans: list[tuple[int, int, int]], block_size: int) -> StepBatch:
        """Spans are (sequence, start, length); the blocks of the sequences take turns, back to front."""
        per_sequence = -(-self.context // block_size)
        tables = np.asarray([[3 * b + s for b in range(per_sequence)][::-1] for s, _, _ in spans])
        lengths, starts = (np.asarray([span[i] for span in spans]) for i in (2, 1))
        positions = np.concatenate([np.arange(start, start + size) for _, start, size in spans])
        rows = np.repeat(np.arange(len(spans)), lengths)
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        return step_batch(
            token_ids_T=np.concatenate([self.ids[s, start : start + size] for s, start, size in spans]),
            positions_T=positions,
            logit_rows_R=np.arange(len(positions)),
            span_start_S=np.cumsum(lengths) - lengths,
            span_length_S=lengths,
            kv_length_S=starts + lengths,
            groups=[GroupStep(slots, np.zeros(len(spans), dtype=np.int64), tables)],
        )


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("level", LEVELS)
def test_float32_equals_the_reference(level: str, seed: int) -> None:
    block_size = (1, 4, 16, 32, 64, 8)[seed]
    model = Model(random_mixer(seed), seed=seed)
    executable = model.executable(level, block_size)
    assert error(model.run(executable, block_size, seed, (0, 1, 1, 2, 17, 40)), model.expected()) <= 1e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mixer", [SMALL, DEEPSEEK])
def test_bfloat16_is_near_the_reference(level: str, mixer: LatentAttention) -> None:
    model = Model(mixer, dtype=torch.bfloat16)
    assert error(model.run(model.executable(level, 16), 16, 1, (1, 5, 30)), model.expected()) <= 4e-2


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", [LEVELS[0], _native.best_level()])
def test_long_contexts_are_expanded_part_by_part(level: str, threads: int) -> None:
    """More tokens than the keys and values that a worker expands at once, and splits of absorbed decoding."""
    mixer = replace(SMALL, num_heads=2)
    model = Model(mixer, context=1300)
    sizes = LatentSizes(2, mixer.kv_rank, mixer.rope_dim, mixer.nope_dim, mixer.value_dim)
    assert sizes.expands(400, 1300) and not sizes.expands(1, 1300)
    actual = model.run(model.executable(level, 16, num_threads=threads), 16, 1, (1, 1, 1, 400, 450))
    assert error(actual, model.expected()) <= 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_deterministic_results_do_not_depend_on_the_schedule(level: str) -> None:
    model = Model(SMALL, dtype=torch.bfloat16)
    results = [
        model.run(model.executable(level, 16, num_threads=threads, deterministic=True), 16, seed, sizes)
        for threads, seed, sizes in ((1, 1, (40,)), (2, 2, (1, 7, 11)), (3, 3, (0, 1, 3)))
    ]
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])


def test_the_form_is_chosen_by_one_rule() -> None:
    rng = Random(0)
    chosen = set()
    for _ in range(300):
        heads, latent, rope, nope, value = (rng.choice([1, 8, 64, 512]) for _ in range(5))
        tokens = rng.choice([1, 2, 40, 170, 2048])
        kv_length = tokens + rng.choice([0, 1, 100, 8192])
        expands = LatentSizes(heads, latent, rope, nope, value).expands(tokens, kv_length)
        assert _native.latent_expands(heads, latent, rope, nope, value, tokens, kv_length) == expands
        chosen.add(expands)
    assert chosen == {False, True}
    deepseek = LatentSizes(128, 512, 64, 128, 128)
    assert not deepseek.expands(1, 8192) and deepseek.expands(512, 8192) and deepseek.expands(2048, 2048)


@pytest.mark.parametrize(("kind", "entry_bytes"), [("bf16", 2), ("f32", 4)])
def test_a_token_takes_its_latent_and_nothing_more(kind: str, entry_bytes: int) -> None:
    memory = _native.KvMemory(kind, 1, 576, 16, 0, latent_dim=512)
    assert memory.block_bytes == 16 * 576 * entry_bytes
