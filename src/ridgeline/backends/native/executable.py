"""The program over the paged cache in native code: a step is one call."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import numpy as np

from ridgeline import _native
from ridgeline.backends.native.compile import Compiler, Emitter, Part, Place
from ridgeline.backends.native.emit import EMITTERS
from ridgeline.backends.native.memory import address, allocate_cache, huge_page_share, logits_width
from ridgeline.backends.native.settings import NativeSettings
from ridgeline.backends.native.timings import TapeTimings
from ridgeline.backends.native.warm_cache import CacheWarmer
from ridgeline.backends.native.weights import NativeWeights, Store
from ridgeline.backends.step import (
    Chained,
    ChainEnds,
    Check,
    Executable,
    IntArray,
    RoundsOutput,
    StepBatch,
    StepOutput,
)
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.config import Choice
from ridgeline.core.dtypes import Array
from ridgeline.core.errors import WeightsLostError
from ridgeline.core.step import BlockTable, Rounds
from ridgeline.cost.efficiency import OpTiming
from ridgeline.program.op import Program
from ridgeline.weights.load import StreamedWeights

Started = tuple[StepBatch, np.ndarray, IntArray, np.ndarray | None]
"""A step that is computed, and where its logits, its tokens and, if they are taken, the times of its parts and its taps
go."""

MIN_READ_BYTES, MAX_READ_BYTES = 128 << 20, 256 << 20  # of weights that say how fast memory is


class NativeExecutable:
    """Runs a program bound to packed weights and to cache memory.

    `native` names the kinds of groups that run as one: the others run op by op. `pool` are threads that another
    executable has as well. All else is as `load_weights` has it.
    """

    def __init__(
        self,
        program: Program,
        load: Callable[[], Mapping[str, Array]],
        layout: CacheLayout,
        settings: NativeSettings,
        store: Store | None = None,
        native: Mapping[str, Emitter] = EMITTERS,
        prequantized: StreamedWeights | None = None,
        pool: _native.Pool | None = None,
    ) -> None:
        self._program, self._layout, self._native = program, layout, native
        self.pool = pool or _native.Pool(settings.num_threads)
        self._cache = allocate_cache(program, layout, settings.kv)
        self._drafting: tuple[NativeExecutable, ChainEnds] | None = None
        self.load_weights(load, settings, store, prequantized)
        self._warmer = CacheWarmer(self._cache, layout)
        self._warmer.stay_ahead(0)

    def load_weights(
        self,
        load: Callable[[], Mapping[str, Array]],
        settings: NativeSettings,
        store: Store | None = None,
        prequantized: StreamedWeights | None = None,
    ) -> None:
        """Compute with the weights that `load` gives, packed as `settings` say; between steps, after `drop_weights`.

        It is called only where `store` has not all parts. `prequantized` reads the weights that
        `settings.prequantized` names.
        """
        program, self.settings, self._store = self._program, settings, store
        self._tape = _native.Tape(settings.level, self.pool, settings.deterministic)
        how = (settings.level, settings.num_threads, store, prequantized, settings.variants)
        self._weights = NativeWeights(load, *how)
        compiler = Compiler(program, self._weights, settings, self._tape, self._cache)
        self.parts: Sequence[Part] = compiler.compile(self._native)
        self._features = compiler.features
        self._taps = [compiler.place(name) for name in program.taps]
        self._taps_width = sum(place.width for place in self._taps)
        self._tells_taps = True
        for place in self._taps:
            self._tape.retain(place.buffer)
        self._result = compiler.places.get(program.result)  # None: logits, which are no buffer of the tape
        self._weights.release()
        self._logits_width = logits_width(program)
        self._timings = TapeTimings(program, settings, self.parts)
        self._logits: list[np.ndarray | None] = [None, None]  # of the last step, and of one before or behind it
        self._started: Started | None = None
        self._following: Started | None = None
        self._tape.sample(program.vocab_size)
        self._likeliest = _native.Likeliest(settings.level, program.vocab_size).of

    def __del__(self) -> None:
        """End a step that was started, while there still is what it reads and writes."""
        goes_on = getattr(self, "_started", None) is not None
        with suppress(RuntimeError, ValueError):  # in a process that was forked nobody computes anything
            while goes_on:
                _, goes_on = self._tape.finish()

    def drop_weights(self) -> None:
        """Free the weights: no step is computed until there are others."""
        self._weights.drop()
        del self._tape, self._weights, self.parts, self._timings

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._weights.num_bytes

    @property
    def workspace_bytes(self) -> int:
        """The bytes that the steps so far have allocated beside weights and cache."""
        return self._tape.allocated_bytes

    @property
    def overlaps(self) -> bool:
        """Whether the pool has threads beside the calling one."""
        return self.pool.size > 1

    def adapter_factors(self, name: str) -> Array:
        shape = self._program.weights[name]
        return self._weights.entries(name)[: math.prod(shape)].reshape(shape)

    def facts(self) -> Mapping[str, Choice]:
        """Return how much of the packed weights' memory is in huge pages, where the system tells."""
        share = huge_page_share(self._weights.largest_parts(MAX_READ_BYTES))
        return {} if share is None else {"huge_pages": Choice(f"{share:.0%}", "of the packed weights' memory")}

    def read_bandwidth(self) -> float | None:
        """Measure the bytes per second at which all threads read weights; None where caches could hold them."""
        parts = list(self._weights.largest_parts(MAX_READ_BYTES))
        num_bytes = sum(part.nbytes // 64 * 64 for part in parts)
        if num_bytes < MIN_READ_BYTES:
            return None
        fastest_s = math.inf
        for _ in range(3):
            started = time.perf_counter()
            for part in parts:
                _native.read_all(self.settings.level, self.pool, address(part), part.nbytes // 64 * 64)
            fastest_s = min(fastest_s, time.perf_counter() - started)
        return num_bytes / fastest_s

    def run(self, step: StepBatch, features_TW: Array | None = None) -> StepOutput:
        """Compute the step, update the cache, and sample the tokens of `step.sampling`."""
        if self._features is not None:
            assert features_TW is not None, "this program reads features"
            self._tape.run(step.block, self._room(len(step.logit_rows_R)), 0, 0)  # sizes the buffers
            self._rows(self._features, step)[:] = features_TW
        return self._run(step, timed=False)[0]

    def timed(self, step: StepBatch) -> tuple[StepOutput, Iterable[OpTiming]]:
        """Do as `run` and return how long each group took, from barrier to barrier; the last timing is sampling."""
        return self._run(step, timed=True)

    def start(self, step: StepBatch) -> None:
        """Do as `run` on the pool's other threads, until `finish`."""
        self._following = None
        self._copy_blocks(step)
        self._started = started = self._laid(step)
        self._tape.start(step.block, *started[1:], step.trials)

    def follow(self, step: StepBatch, *, check: Check | None = None) -> bool:
        """Make `finish` start this step as well; return False where results in the tape's buffers would be lost."""
        if self._result is not None or len(step.copies_C3):
            return False
        self._logits.reverse()
        self._following = following = self._laid(step)
        checking = None if check is None or self._started is None else partial(self._check, check, self._started)
        self._tape.follow(step.block, *following[1:], checking)
        return True

    def finish(self) -> tuple[StepOutput, bool]:
        """Finish the step that was started, in this thread as well; return what `run` does.

        The last value tells whether the step that follows was started.
        """
        assert self._started is not None, "no step was started"
        started, self._started = self._started, None
        following, self._following = self._following, None
        highest_slot, goes_on = self._tape.finish()
        if goes_on:
            self._started = following
        self._warmer.stay_ahead(highest_slot)
        return self._output(started), goes_on

    def chain(
        self, step: StepBatch, lengths_D: IntArray, ends: ChainEnds, features_TW: Array | None, *, tells: bool
    ) -> Chained:
        """Compute a step and those that follow from what each samples, as `Chaining` has it, in one call."""
        self._copy_blocks(step)
        token_ids_KD = np.empty((lengths_D[0], len(lengths_D)), dtype=np.int64)
        weights_KDV = np.empty((*token_ids_KD.shape, self._program.vocab_size), dtype=np.float32) if tells else None
        features = None
        if self._features is not None and features_TW is not None:
            fold, buffers = ends.fold, (self._features.buffer, self._taps[-1].buffer)
            assert isinstance(fold, NativeExecutable) and fold._features and fold._result, "it makes features of others"
            features = (*buffers, fold._tape, fold._features.buffer, fold._result.buffer, features_TW)
        logits, size = self._room(len(step.logit_rows_R)), self._layout.block_size
        of_tokens = (ends.vocab_size, ends.token_ids_V, features, weights_KDV, self._program.vocab_size)
        highest_slot = self._tape.chain(step.block, logits, lengths_D, token_ids_KD, size, *of_tokens)
        self._warmer.stay_ahead(highest_slot)
        return Chained(token_ids_KD, weights_KDV)

    @property
    def goes_on(self) -> bool:
        """Whether steps may have several rounds: not over states that are taken back from a log."""
        return not any(group.kind == "recurrent" for group in self._layout.groups)

    def tell_taps(self, asked: bool) -> None:
        self._tells_taps = asked

    def goes_on_with(self, drafter: Executable, ends: ChainEnds) -> bool:
        if not isinstance(drafter, NativeExecutable) or not self.goes_on:
            return False
        self._drafting = drafter, ends
        return (drafter._features is None) == (ends.fold is None)

    def rounds(self, step: StepBatch, rounds: Rounds, hurry: IntArray) -> RoundsOutput:
        """Compute a step and those that verify what is drafted behind it, as `Rounding` has it, in one call."""
        self._copy_blocks(step)
        num_tokens = len(step.token_ids_T)
        longest = max(num_tokens, 1 + rounds.longest)
        token_ids_RT, sampled_RT = (np.empty((rounds.most, longest), dtype=np.int64) for _ in range(2))
        rows = (self._room(longest), self._layout.block_size)
        stops = [(span, token_id) for span, token_ids in enumerate(rounds.stop_ids) for token_id in token_ids]
        to = (np.array(stops, dtype=np.int64).reshape(-1, 2), hurry, token_ids_RT, sampled_RT)
        texts = cast("list[_native.SuffixIndex]", list(rounds.texts))
        if not rounds.tables:
            given = (texts, *rounds.limits, np.array(rounds.room, dtype=np.int64))
            width = self._taps_width
            taps_TW = np.empty((rounds.most * num_tokens, width), dtype=np.float32) if width else None
            num_rounds, highest, seconds = self._tape.looked_up(step.block, *rows, *given, *to, taps_TW)
            self._warmer.stay_ahead(highest)
            return RoundsOutput(token_ids_RT[:num_rounds], sampled_RT[:num_rounds], taps_TW, seconds=seconds)
        assert self._drafting is not None, "a drafter was given"
        drafter, ends = self._drafting
        features = taps_TW = None
        if drafter._features is not None:
            fold, buffers = ends.fold, (drafter._features.buffer, drafter._taps[-1].buffer)
            assert isinstance(fold, NativeExecutable) and fold._features and fold._result, "it makes features of others"
            taps_TW = np.empty((longest, self._taps_width), dtype=np.float32)
            features = (*buffers, fold._tape, fold._features.buffer, fold._result.buffer, taps_TW)
        by_ids = (drafter._layout.block_size, ends.vocab_size, ends.token_ids_V, rounds.max_final)
        of_drafter = (drafter._tape, *by_ids, drafter._room(len(rounds.room)), drafter._program.vocab_size)
        matches = rounds.min_matched or [0] * len(rounds.room)
        spans_3S = np.array([rounds.begins, rounds.room, matches], dtype=np.int64)
        given = (of_drafter, features, [_table(tables) for tables in rounds.tables], spans_3S)
        others = (
            step.trials,
            rounds.proposal,
            texts,
            (rounds.longest, *rounds.limits, rounds.max_s, rounds.plain_round),
        )
        told_R = np.empty((rounds.most, 2), dtype=np.int64)
        count, highest, of_drafts, *seconds = self._tape.rounds(step.block, *rows, *given, *to, *others, told_R)
        self._warmer.stay_ahead(highest)
        drafter._warmer.stay_ahead(of_drafts)
        return RoundsOutput(token_ids_RT[:count], sampled_RT[:count], taps_TW, told_R[:count], *seconds)

    def _run(self, step: StepBatch, *, timed: bool) -> tuple[StepOutput, Iterable[OpTiming]]:
        self._copy_blocks(step)
        _, logits, sampled_token_ids, taps_TW = laid = self._laid(step)
        seconds, size = np.zeros(len(self._tape)) if timed else None, len(self._tape)
        highest_slot = self._tape.run(step.block, logits, 0, size, sampled_token_ids, seconds, taps_TW, step.trials)
        self._warmer.stay_ahead(highest_slot)
        return self._output(laid), () if seconds is None else self._timings.of(seconds.tolist())

    def _laid(self, step: StepBatch) -> Started:
        """Return the step with room for its results."""
        sampled_token_ids = np.empty(len(step.sampling.logit_row), np.int64)
        tells = self._taps and self._tells_taps
        taps_TW = np.empty((len(step.token_ids_T), self._taps_width), np.float32) if tells else None
        return step, self._room(len(step.logit_rows_R)), sampled_token_ids, taps_TW

    def _copy_blocks(self, step: StepBatch) -> None:
        for group, source, target in step.copies_C3.tolist() if len(step.copies_C3) else ():
            for state in self._layout.groups[group].states:
                if state in self._cache.kv:
                    self._cache.kv[state][0].copy_block(source, target)
                else:
                    for part in self._cache.recurrent[state][0]:
                        part[target] = part[source]

    def _output(self, started: Started) -> StepOutput:
        step, logits, sampled_token_ids, taps_TW = started
        if self._store is not None and self._store.is_cut:
            raise WeightsLostError(
                "the file of packed weights was cut off while it was in use; start again to rebuild it"
            )
        if self._result is not None:
            return StepOutput(self._rows(self._result, step).copy())
        likeliest = partial(self._likeliest, logits)
        return StepOutput(logits[:, : self._program.vocab_size], sampled_token_ids, likeliest, taps_TW)

    def _check(self, check: Check, started: Started) -> None:
        check(self._output(started))

    def _room(self, num_rows: int) -> np.ndarray:
        """Return memory for the step's logits, that of an earlier step where it has as many rows."""
        logits = self._logits[0]
        if logits is None or len(logits) != num_rows:
            logits = self._logits[0] = None  # freed before more is taken
            logits = self._logits[0] = np.empty((num_rows, self._logits_width), dtype=np.float32)
        return logits

    def _rows(self, place: Place, step: StepBatch) -> np.ndarray:
        count = len(step.token_ids_T if place.rows == "tokens" else step.logit_rows_R)
        return self._tape.view(place.buffer, count)


def _table(tables: Sequence[BlockTable]) -> tuple[IntArray, IntArray]:
    """Return the blocks of tables [S, B], padded with 0, and the position of the first token of each [S]."""
    tables_SB = np.zeros((len(tables), max(len(table.blocks) for table in tables)), dtype=np.int64)
    for row_B, table in zip(tables_SB, tables):
        row_B[: len(table.blocks)] = table.blocks
    return tables_SB, np.array([table.first_token for table in tables], dtype=np.int64)
