"""One recurrent layer of random shape on a tape of its own, and what it should compute, in numpy.

A layer's operands and what it keeps are random float32; its oracle goes token by token in the dtype it is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from native_steps import step_batch

from ridgeline import _native
from ridgeline.backends.step import GroupStep


@dataclass
class Layer:
    """`oracle(inputs, dtype)` gives the outputs [T, W] of one sequence and its state. `add(tape, buffers, out, state)`
    puts the layer on a tape; what it refers to by address is in `weights`."""

    widths: Sequence[int]  # of the inputs
    out_width: int
    part: tuple[int, ...]
    oracle: Callable
    add: Callable
    weights: Sequence[np.ndarray]
    scales: Sequence[float]  # of the inputs
    logged: Sequence[int] = ()  # the inputs that the state depends on


class Run:
    """The layer over some sequences, step by step. Slots that no sequence has written hold NaN, and so do their logs,
    of spans with up to `max_logged` tokens."""

    def __init__(
        self, layer: Layer, inputs: Sequence[np.ndarray], level: str, threads: int, deterministic=False, max_logged=0
    ):
        """`inputs` are [S, L, W] each."""
        self._inputs = [np.ascontiguousarray(x.reshape(-1, x.shape[-1])) for x in inputs]
        self._length = inputs[0].shape[1]
        self._layer = layer
        self._pool = _native.Pool(threads)
        self._tape = _native.Tape(level, self._pool, deterministic)
        buffers = [self._tape.buffer("tokens", width) for width in layer.widths]
        for buffer, rows in zip(buffers, self._inputs):
            self._tape.embed_rows(rows.ctypes.data, "f32", "tokens", 1.0, buffer)
        self._out = self._tape.buffer("tokens", layer.out_width)
        self.state = np.full((2 * len(inputs[0]) + 1, *layer.part), np.nan, dtype=np.float32)
        width = sum(layer.widths[i] for i in layer.logged)
        self.log = np.full((len(self.state), 2 * max_logged, width), np.nan, dtype=np.float32)
        self.pending = [0] * len(inputs[0])
        of_log = (self.log.ctypes.data, width, 2 * max_logged) if max_logged else ()
        part = _native.StatePart(self.state.ctypes.data, self.state[0].size, 0, *of_log)
        layer.add(self._tape, buffers, self._out, part)

    @staticmethod
    def slot(sequence: int) -> int:
        return 2 * sequence + 1

    def step(self, spans: Sequence[tuple[int, int, int]], drafts: Sequence[Sequence[int]] = ()) -> list[np.ndarray]:
        """The outputs of spans (sequence, start, length). Behind each come the rows of `drafts`, which are taken back:
        spans that have any are logged."""
        drafts = drafts or [()] * len(spans)
        rows = [s * self._length + np.arange(start, start + size) for s, start, size in spans]
        ids = np.concatenate([np.append(own, wrong).astype(np.int64) for own, wrong in zip(rows, drafts)])
        starts = np.asarray([span[1] for span in spans], dtype=np.int64)
        lengths = np.asarray([span[2] + len(wrong) for span, wrong in zip(spans, drafts)], dtype=np.int64)
        slots = np.repeat([-1 if len(wrong) else self.slot(s) for (s, _, _), wrong in zip(spans, drafts)], lengths)
        pending = np.asarray([self.pending[s] for s, _, _ in spans], dtype=np.int64)
        for (s, _, size), wrong in zip(spans, drafts):
            self.pending[s] = size if len(wrong) else 0
        tables = np.asarray([[self.slot(s), 0] for s, _, _ in spans], dtype=np.int64)
        batch = step_batch(
            token_ids_T=ids,
            positions_T=ids,
            span_start_S=np.cumsum(lengths) - lengths,
            span_length_S=lengths,
            kv_length_S=starts + lengths,
            groups=[GroupStep(slots, pending, tables)],
        )
        self._tape.run(batch.block, np.zeros((0, 32), dtype=np.float32), 0, len(self._tape))
        out = self._tape.view(self._out, len(ids))[:, : self._layer.out_width].copy()
        return [rows[:size] for rows, (_, _, size) in zip(np.split(out, np.cumsum(lengths)[:-1]), spans)]

    def all(self, chunks: Callable[[], int], drafts: Callable[[int], Sequence[int]] = lambda size: ()) -> np.ndarray:
        """All tokens of all sequences, [S, L, W], in spans of `chunks()` tokens; 0: the sequence sits a step out.

        Behind each of `size` tokens come the rows of `drafts(size)`.
        """
        num_sequences = len(self._inputs[0]) // self._length
        out = np.full((num_sequences, self._length, self._layer.out_width), np.nan, dtype=np.float32)
        done = [0] * num_sequences
        while any(at < self._length for at in done):
            spans = [(s, at, min(chunks(), self._length - at)) for s, at in enumerate(done)]
            spans = [span for span in spans if span[2]]
            behind = [drafts(size) for _, _, size in spans]
            for (s, start, size), rows in zip(spans, self.step(spans, behind) if spans else []):
                out[s, start : start + size] = rows
                done[s] += size
        return out


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def silu(x):
    return x / (1 + np.exp(-x))


def causal_conv(rng: np.random.Generator) -> Layer:
    channels, taps = int(rng.integers(1, 80)), int(rng.integers(2, 6))
    weight, bias = rng.standard_normal((channels, taps)), rng.standard_normal(channels)
    activation, with_bias = rng.choice([None, "silu"]), rng.random() < 0.5
    weight, bias = weight.astype(np.float32), bias.astype(np.float32)
    by_tap = np.ascontiguousarray(weight.T)

    def oracle(inputs, dtype):
        x = np.concatenate([np.zeros((taps - 1, channels)), inputs[0]]).astype(dtype)
        y = sum(weight[:, i].astype(dtype) * x[i : i + len(inputs[0])] for i in range(taps))
        y = y + (bias if with_bias else 0)
        return y if activation is None else silu(y), x[len(x) - taps + 1 :].T

    def add(tape, buffers, out, state):
        tape.causal_conv(buffers[0], out, taps, address(by_tap), state, address(bias) if with_bias else 0, activation)

    return Layer([channels], channels, (channels, taps - 1), oracle, add, [by_tap, bias], [1.0], [0])


def selective_scan(rng: np.random.Generator) -> Layer:
    channels, size = int(rng.integers(1, 70)), int(rng.choice([1, 3, 16, 21]))
    rate = -np.exp(rng.uniform(-3, 3, (channels, size))).astype(np.float32)
    skip = rng.standard_normal(channels).astype(np.float32)

    def oracle(inputs, dtype):
        x, dt, b, c = (i.astype(dtype) for i in inputs)
        dt, h, rows = softplus(dt), np.zeros((channels, size), dtype), []
        for t in range(len(x)):
            h = np.exp(dt[t][:, None] * rate) * h + (dt[t] * x[t])[:, None] * b[t]
            rows.append(h @ c[t] + skip * x[t])
        return np.asarray(rows), h

    def add(tape, buffers, out, state):
        tape.selective_scan(*buffers, out, address(rate), address(skip), state)

    return Layer(
        [channels, channels, size, size], channels, rate.shape, oracle, add, [rate, skip], [1, 3, 1, 1], [0, 1, 2]
    )


def _heads(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Heads, heads of keys, sizes of keys and of values."""
    key_heads = int(rng.integers(1, 4))
    return key_heads * int(rng.integers(1, 4)), key_heads, int(rng.choice([1, 7, 16, 40])), int(rng.integers(1, 70))


def ssd(rng: np.random.Generator) -> Layer:
    heads, groups, n, p = _heads(rng)
    rate = -np.exp(rng.uniform(-4, 3, heads)).astype(np.float32)
    skip, dt_bias = (rng.standard_normal(heads).astype(np.float32) for _ in range(2))
    limits = (0.0, np.inf) if rng.random() < 0.5 else (0.1, 2.0)

    def oracle(inputs, dtype):
        x, dt, b, c = (i.astype(dtype) for i in inputs)
        x = x.reshape(-1, heads, p)
        b, c = (i.reshape(-1, groups, n).repeat(heads // groups, axis=1) for i in (b, c))
        dt, h, rows = np.clip(softplus(dt + dt_bias), *limits), np.zeros((heads, p, n), dtype), []
        for t in range(len(x)):
            h = np.exp(dt[t] * rate)[:, None, None] * h + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
            rows.append((h * c[t][:, None]).sum(-1) + skip[:, None] * x[t])
        return np.asarray(rows, dtype).reshape(len(x), -1), h

    def add(tape, buffers, out, state):
        x, dt, b, c = buffers
        gates = {"rate": address(rate), "dt_bias": address(dt_bias), "skip": address(skip)}
        gates |= {"dt_min": limits[0], "dt_max": limits[1]}
        tape.recur("ssd", heads, groups, q=c, k=b, v=x, dt=dt, beta=None, out=out, state=state, **gates)

    widths = [heads * p, heads, groups * n, groups * n]
    return Layer(widths, heads * p, (heads, p, n), oracle, add, [rate, skip, dt_bias], [1, 3, 1, 1], [0, 1, 2])


def delta_rule(rng: np.random.Generator) -> Layer:
    heads, key_heads, k_size, v_size = _heads(rng)
    rate = -np.exp(rng.uniform(-4, 3, heads)).astype(np.float32)
    dt_bias = rng.standard_normal(heads).astype(np.float32)

    def oracle(inputs, dtype):
        q, k, v, a, b = (i.astype(dtype) for i in inputs)
        q, k = (i.reshape(-1, key_heads, k_size).repeat(heads // key_heads, axis=1) for i in (q, k))
        q, k = (i / np.sqrt((i * i).sum(-1, keepdims=True) + dtype(1e-6)) for i in (q, k))
        v = v.reshape(-1, heads, v_size)
        decay, beta = np.exp(rate * softplus(a + dt_bias)), 1 / (1 + np.exp(-b))
        h, rows = np.zeros((heads, k_size, v_size), dtype), []
        for t in range(len(q)):
            h = decay[t][:, None, None] * h
            error = v[t] - (h * k[t][..., None]).sum(1)
            h = h + k[t][..., None] * (beta[t][:, None] * error)[:, None]
            rows.append((h * q[t][..., None]).sum(1) / dtype(k_size) ** dtype(0.5))
        return np.asarray(rows, dtype).reshape(len(q), -1), h

    def add(tape, buffers, out, state):
        q, k, v, a, b = buffers
        gates = {"rate": address(rate), "dt_bias": address(dt_bias)}
        tape.recur("delta", heads, key_heads, q=q, k=k, v=v, dt=a, beta=b, out=out, state=state, **gates)

    widths = [key_heads * k_size, key_heads * k_size, heads * v_size, heads, heads]
    return Layer(
        widths, heads * v_size, (heads, k_size, v_size), oracle, add, [rate, dt_bias], [1, 1, 1, 3, 2], [1, 2, 3, 4]
    )


def retention(rng: np.random.Generator) -> Layer:
    heads, _, k_size, v_size = _heads(rng)
    rate = -np.exp(rng.uniform(-6, 2, heads)).astype(np.float32)

    def oracle(inputs, dtype):
        q, k = (i.astype(dtype).reshape(-1, heads, k_size) for i in inputs[:2])
        v = inputs[2].astype(dtype).reshape(-1, heads, v_size)
        decay, h, rows = np.exp(rate.astype(dtype)), np.zeros((heads, k_size, v_size), dtype), []
        for t in range(len(q)):
            h = decay[:, None, None] * h + k[t][..., None] * v[t][:, None]
            rows.append((h * q[t][..., None]).sum(1))
        return np.asarray(rows, dtype).reshape(len(q), -1), h

    def add(tape, buffers, out, state):
        q, k, v = buffers
        gates = {"dt": None, "beta": None, "rate": address(rate)}
        tape.recur("retention", heads, heads, q=q, k=k, v=v, out=out, state=state, **gates)

    widths = [heads * k_size, heads * k_size, heads * v_size]
    return Layer(widths, heads * v_size, (heads, k_size, v_size), oracle, add, [rate], [1, 1, 1], [1, 2])


LAYERS = {layer.__name__: layer for layer in (causal_conv, selective_scan, ssd, delta_rule, retention)}


def inputs_of(layer: Layer, rng: np.random.Generator, sequences: int, length: int) -> list[np.ndarray]:
    """Random operands, [S, L, W] each."""
    return [
        (scale * rng.standard_normal((sequences, length, width))).astype(np.float32)
        for width, scale in zip(layer.widths, layer.scales)
    ]
