"""Steps for executables without an engine: a random schedule over a few sequences, as StepBatches."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ridgeline import _native
from ridgeline.backends.native.executable import NativeExecutable
from ridgeline.backends.native.settings import MatrixFormat, NativeSettings
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.backends.step import GroupStep, SamplingMetadata, StepBatch, StepShape
from ridgeline.cache.layout import CacheLayout, KvStateSize, RecurrentStateSize, StateSize, plan_layout
from ridgeline.program.op import Program, RecurrentState

F32 = MatrixFormat(kind="f32", inputs="f32")
BF16 = MatrixFormat(kind="bf16", inputs="bf16")
BLOCK_SIZE = 4
CONTEXT = 40
NUM_BLOCKS = CONTEXT // BLOCK_SIZE


def sizes_of(program: Program) -> list[StateSize]:
    return [
        RecurrentStateSize(state.num_bytes)
        if isinstance(state, RecurrentState)
        else KvStateSize(state.bytes_per_token(4), state.window)
        for state in program.states
    ]


def layout_of(program: Program, sequences: int = 4) -> CacheLayout:
    sizes = sizes_of(program)
    sequence_bytes = sum(
        size.num_bytes if isinstance(size, RecurrentStateSize) else CONTEXT * size.bytes_per_token for size in sizes
    )
    return plan_layout(sizes, BLOCK_SIZE, sequences * sequence_bytes * 2, CONTEXT, CONTEXT, sequences)


def native(program: Program, weights: Mapping[str, torch.Tensor], level: str, **settings: object) -> NativeExecutable:
    """An executable of two threads in float32, but for `settings`."""
    return NativeExecutable(program, lambda: as_arrays(weights), layout_of(program), settings_of(level, **settings))


def settings_of(level: str, **settings: object) -> NativeSettings:
    """Two threads in float32, but for `settings`."""
    defaults = {"num_threads": 2, "dtype": "float32", "matrices": F32, "head": F32, "kv": "f32"}
    return NativeSettings(level=level, **(defaults | settings))


def no_sampling() -> SamplingMetadata:
    return SamplingMetadata(
        *(np.zeros(0, dtype) for dtype in (np.int64, np.float32, np.int32, np.float64, np.float64, "u8", "u8", "i8")),
        np.zeros((0, 0), dtype="u8"),
    )


def step_batch(
    groups: Sequence[GroupStep] = (), sampling: SamplingMetadata | None = None, **arrays: np.ndarray
) -> StepBatch:
    """A batch of the given arrays, those of every span empty where they are left out; `bidirectional_block_S`
    is 1, no copies.
    """
    sampling, spans = sampling or no_sampling(), len(arrays.get("span_start_S", ()))
    shape = StepShape(
        num_tokens=len(arrays["token_ids_T"]),
        num_spans=spans,
        num_rows=len(arrays.get("logit_rows_R", ())),
        num_sample_rows=len(sampling.logit_row),
        num_copies=0,
        has_adapters="adapters_T" in arrays,
        table_widths=tuple(group.tables_SB.shape[1] for group in groups),
        masks=sampling.masks_MW.shape,
    )
    batch = StepBatch.lay_out(np.zeros(shape.num_words, dtype=np.int64), shape)
    batch.bidirectional_block_S[:] = 1
    pairs = [(batch, name, values) for name, values in arrays.items()]
    for given, laid in ((sampling, batch.sampling), *zip(groups, batch.groups)):
        pairs += [(laid, name, getattr(given, name)) for name in given.__slots__ if name != "open_masks"]
    for laid, name, values in pairs:
        getattr(laid, name)[:] = values
    return batch


def step(
    program: Program, spans: Sequence[tuple[int, int, Sequence[int]]], sampling: SamplingMetadata | None = None
) -> StepBatch:
    """Spans are (sequence, start, token ids); every token gets logits. Sequence s lives in blocks of its own."""
    lengths = np.asarray([len(ids) for _, _, ids in spans])
    starts = np.asarray([start for _, start, _ in spans])
    tables = np.asarray([[s * NUM_BLOCKS + (7 * b + s) % NUM_BLOCKS for b in range(NUM_BLOCKS)] for s, _, _ in spans])
    positions = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids in spans])
    sequences = np.asarray([[s] for s, _, _ in spans])
    span_of = np.repeat(np.arange(len(spans)), lengths)
    slots = tables[span_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    first_token = np.zeros(len(spans), dtype=np.int64)
    of_tokens, of_sequences = GroupStep(slots, first_token, tables), GroupStep(span_of, first_token, sequences)
    return step_batch(
        token_ids_T=np.concatenate([np.asarray(ids, dtype=np.int64) for _, _, ids in spans]),
        positions_T=positions,
        logit_rows_R=np.arange(len(positions)),
        span_start_S=np.cumsum(lengths) - lengths,
        span_length_S=lengths,
        kv_length_S=starts + lengths,
        groups=[of_sequences if group.kind == "recurrent" else of_tokens for group in layout_of(program).groups],
        sampling=sampling,
    )


def schedule(tokens_SL: np.ndarray, rng: np.random.Generator) -> Iterator[list[tuple[int, int, list[int]]]]:
    """All tokens of all sequences, in random chunks, some sequences sitting out."""
    done = [0] * len(tokens_SL)
    while any(at < tokens_SL.shape[1] for at in done):
        spans = []
        for s, at in enumerate(done):
            left = tokens_SL.shape[1] - at
            size = min(left, int(rng.choice([0, 1, 1, 2, 5, 17])))
            if size:
                spans.append((s, at, tokens_SL[s, at : at + size].tolist()))
                done[s] += size
        if spans:
            yield spans


class Doubler:
    """The smallest tape: looks up rows of a table and adds them to themselves, thrice."""

    def __init__(self, pool):
        self._rows = np.arange(8 * 40, dtype=np.float32).reshape(8, 40)
        self._tape = _native.Tape("portable", pool, False)
        self._buffers = [self._tape.buffer("tokens", 40) for _ in range(2)]
        self._tape.embed_rows(self._rows.ctypes.data, "f32", "tokens", 1.0, self._buffers[0])
        for source, target in ((0, 1), (1, 0), (0, 1)):
            self._tape.add(self._buffers[source], self._buffers[source], self._buffers[target])

    def is_right(self, token_ids) -> bool:
        ids = np.asarray(token_ids, dtype=np.int64)
        self.run(ids)
        return bool((self._tape.view(self._buffers[1], len(ids))[:, :40] == 8 * self._rows[ids]).all())

    def run(self, ids) -> None:
        block = step_batch(token_ids_T=ids, positions_T=ids).block
        self._tape.run(block, np.zeros((0, 32), dtype=np.float32), 0, len(self._tape))
