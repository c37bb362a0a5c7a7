"""Sampler: from the logits of a step to its tokens and log-probabilities. The executor calls it around the model.

It holds nothing of requests that is not made anew where it is missing. The order of processing is in the docstring of
`ridgeline.decoding`, the random choice in `random_sample`. Must not import engine or server.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device

from ridgeline.backends.step import SamplingMetadata, StepOutput, Trials
from ridgeline.core.arrays import Array
from ridgeline.core.step import NO_TOKEN, Mask, PromptLogprobRow, SampledToken, SampleRow, TokenLogprob, Weights
from ridgeline.decoding.checking import Checked, other_token
from ridgeline.decoding.largest import largest
from ridgeline.decoding.logprobs import token_logprobs
from ridgeline.decoding.processors import FIRST_NARROWED, Processor, load_processors
from ridgeline.decoding.random_sample import integer_weights, random_sample, random_word
from ridgeline.decoding.rejection import sample, typical, verify, verify_block

_NARROW_K = 1024  # rows with a top_k up to this leave the vocabulary behind for their k candidates
_WIDE_ROWS = 8  # rows over the whole vocabulary at a time: bounds the scratch memory
_MAX_SAMPLED = 1 << 18  # logits that are truncated and sampled from at a time: what a core's cache holds
_MAX_RECENT = 16  # numbers of rows whose metadata are cached: drafts make steps of a few shapes take turns
_FEW = 8192  # a wide row with fewer tokens inside is sampled from these alone
NOT_FINITE = "the logits of this token are not finite (NaN, +inf, or every token excluded)"
_BARE = ((), (), (), None, None, False, (), None)  # what a row has behind `prompt_ids` where its parameters say it all


@dataclass(slots=True)
class _InStep:
    """Hold what the backend samples in a step, and the indices of their rows in `rows`."""

    rows: Sequence[SampleRow]
    seq_ids: list[int]  # of the rows
    plain: list[int]
    sampling: SamplingMetadata
    bare: bool  # all are plain, and of none more than its token is wanted
    masked: list[tuple[Mask, SampleRow]]  # the plain rows that have one
    checked: list[Checked]
    drafted: list[list[int]]  # the plain rows with a trial, in groups that are verified together
    before: Sequence[SampleRow] = ()  # the rows that `rows` follow


class Sampler:
    """Decides the tokens of a step; one per executor."""

    def __init__(self) -> None:
        processors = load_processors()
        self._edits = tuple(p for p in processors if p.order < FIRST_NARROWED)
        self._truncations = tuple(p for p in processors if p.order >= FIRST_NARROWED)
        self._not_in_step = tuple(p for p in processors if not p.in_step)
        self._last: _InStep | None = None
        self._recent: OrderedDict[int, _InStep] = OrderedDict()  # by the number of rows, the last one at the end

    def sampling_metadata(self, rows: Sequence[SampleRow], *, follows: bool = False) -> SamplingMetadata:
        """Return those of `rows`, in their order, whose tokens a backend may sample within the step.

        Good until the next call; the object is an earlier one where only `num_output` and masks differ. `follows`: the
        rows are those of the last call, `num_output` being one more in each (`StepPlan.follows`). What masks allow is
        for `write_masks` to say.
        """
        last = self._last
        if follows and last is not None:
            np.add(last.sampling.num_output, 1, out=last.sampling.num_output)
            last.before, last.rows = last.rows, rows
            return last.sampling
        last = self._recent.pop(len(rows), None)
        if last is not None and last.bare and not last.masked and not last.drafted and _are_bare(last.rows, rows):
            last.sampling.num_output[:] = [row.num_output for row in rows]
            last.seq_ids, last.rows, last.before = [row.seq_id for row in rows], rows, ()
            self._last = self._recent[len(rows)] = last
            return last.sampling
        plain = self._plain(rows)
        if last is not None and last.plain == plain and _go_on(last.rows, rows):
            last.sampling.num_output[:] = [rows[i].num_output for i in plain]
            sampling = last.sampling
        else:
            sampling = _metadata([rows[i] for i in plain])
        masked = [(mask, rows[i]) for i in plain if (mask := rows[i].allowed) is not None]
        bare = len(plain) == len(rows) and all(row.params.logprobs is None for row in rows)
        drafted = _together(rows, [i for i in plain if rows[i].trial is not None])
        checkers = [(at, rows[i].row, rows[i].checker) for at, i in enumerate(plain)]
        checked = [Checked(at, row, checker) for at, row, checker in checkers if checker is not None]
        of_rows = ([row.seq_id for row in rows], plain, sampling, bare, masked, checked, drafted)
        self._last = self._recent[len(rows)] = _InStep(rows, *of_rows)
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
        return sampling

    def write_masks(self, sampling: SamplingMetadata) -> None:
        """Write what the rows whose metadata were asked for last may be, into theirs or a copy."""
        for at, (mask, row) in enumerate(() if self._last is None else self._last.masked):
            is_open = row.checker is not None and row.checker.is_open and row.checker.allowed is mask
            if not (is_open and sampling.open_masks.get(at)):
                sampling.masks_MW[at], sampling.open_masks[at] = mask, is_open

    @property
    def checked(self) -> Sequence[Checked]:
        """Return what checks the tokens that the backend samples of the rows whose metadata were asked for last."""
        return () if self._last is None else self._last.checked

    def trials(self) -> Trials | None:
        """Return the drafted tokens of the rows whose metadata were asked for last, where the backend verifies some."""
        if self._last is None or not self._last.drafted:
            return None
        rows, plain, drafted = self._last.rows, self._last.plain, self._last.drafted
        place = {i: at for at, i in enumerate(plain)}
        rows_K3: list[tuple[int, int, int]] = []
        for group in drafted:
            lengths = [len(group), *[-1] * (len(group) - 1)] if _is_joint(rows[group[0]]) else [0]
            rows_K3 += [(place[i], trial.token_id, n) for i, n in zip(group, lengths) if (trial := rows[i].trial)]
        weights = [trial.weights_V for group in drafted for i in group if (trial := rows[i].trial)]
        return Trials(np.array(rows_K3, dtype=np.int64), np.stack(weights))

    @property
    def in_step(self) -> bool:
        """Whether the backend samples all rows whose metadata were asked for last."""
        return self._last is not None and len(self._last.plain) == len(self._last.rows)

    @property
    def is_bare(self) -> bool:
        """Whether that is so, and nothing more of these rows is asked for, looked at or verified together."""
        last = self._last
        if last is None or not last.bare or last.masked or last.checked:
            return False
        return not any(_is_joint(last.rows[group[0]]) for group in last.drafted)

    def sample(
        self, output: StepOutput, rows: Sequence[SampleRow], prompt_rows: Sequence[PromptLogprobRow] = ()
    ) -> tuple[tuple[SampledToken, ...], tuple[TokenLogprob, ...]]:
        """Return one SampledToken per row of `rows` and one TokenLogprob per row of `prompt_rows`, in their order.

        Tokens that the backend sampled for `sampling_metadata(rows)` are taken, the others decided here. The logits
        are not written to. Several rows may point at the same logit row. A row whose logits are not finite gets an
        `error` and touches no other.
        """
        last, in_step = self._last, output.sampled_token_ids
        if last is not None and last.rows is not rows and last.before is not rows:
            last = None
        if last is not None and last.bare and in_step is not None and not prompt_rows:
            return tuple(map(_sampled, last.seq_ids, in_step.tolist())), ()
        token_ids, pending = [NO_TOKEN] * len(rows), list(range(len(rows)))
        if in_step is not None:
            plain = self._plain(rows) if last is None else last.plain
            for i, token_id in zip(plain, in_step.tolist(), strict=True):
                token_ids[i] = token_id
            pending = sorted(set(pending).difference(plain))
        weights = self._decide_all(output.logits_RV, rows, pending, token_ids)
        for i in pending:
            checker, token_id = rows[i].checker, token_ids[i]
            if checker is not None and token_id != NO_TOKEN and not checker.allows(token_id):
                token_ids[i] = other_token(checker, output.logits_RV, rows[i].row)
        logprobs = _requested_logprobs(output.logits_RV, rows, token_ids)
        decided = enumerate(zip(rows, token_ids))
        sampled = [_sampled(row.seq_id, token_id, logprobs.get(i)) for i, (row, token_id) in decided]
        for i, told in weights.items():
            sampled[i] = sampled[i]._replace(weights=told)
        if not prompt_rows:
            return tuple(sampled), ()
        prompt = token_logprobs(output.logits_RV, [(row.row, row.token_id, row.num_top) for row in prompt_rows])
        return tuple(sampled), tuple(prompt)

    def _plain(self, rows: Sequence[SampleRow]) -> list[int]:
        """Return the indices of the rows that need nothing but their logits and the parameters of SamplingMetadata."""
        others = self._not_in_step
        bound = [i for i, row in enumerate(rows) if not row.tells_weights and not row.typical]
        plain = [i for i in bound if not any(p.uses(rows[i]) for p in others)]
        if len(plain) == len(rows) or not any(map(_is_joint, rows)):
            return plain
        apart = {row.seq_id for row in rows if any(p.uses(row) for p in others)}  # what is verified together stays so
        return [i for i in plain if rows[i].seq_id not in apart]

    def _decide_all(
        self, logits_RV: Array, rows: Sequence[SampleRow], pending: Sequence[int], token_ids: list[int]
    ) -> dict[int, Weights]:
        """Write the token ids of the `pending` rows whose logits are finite; return the weights that are to be told."""
        weights: dict[int, Weights] = {}
        with np.errstate(all="ignore"):  # what is not finite is found in the outcome
            sound = _sound(logits_RV, rows, pending)
            weighed = [i for i in sound if _is_weighed(rows[i])]
            found = {i: weights_V for i in weighed if (weights_V := self._weigh(logits_RV, rows[i])) is not None}
            for i in found:
                if rows[i].tells_weights:
                    token_ids[i], weights[i] = sample(found[i], random_word(rows[i].seed, rows[i].num_output)), found[i]
                if rows[i].typical:
                    token_ids[i] = typical(found[i], rows[i].typical, random_word(rows[i].seed, rows[i].num_output))
            for group in _together(rows, [i for i in found if rows[i].trial is not None]):
                first, trials = rows[group[0]], [trial for i in group if (trial := rows[i].trial) is not None]
                given = (first.seed, first.num_output)
                if _is_joint(first):
                    decided = verify_block([found[i] for i in group], trials, *given)
                else:
                    decided = [verify(found[group[0]], trials[0], *given)]
                for i, token_id in zip(group, decided, strict=True):
                    token_ids[i] = token_id
            for group in _same_path(rows, [i for i in sound if not _is_weighed(rows[i])]):
                for i, token_id in zip(group, self._decide(logits_RV, [rows[i] for i in group])):
                    token_ids[i] = token_id
        return weights

    def _weigh(self, logits_RV: Array, row: SampleRow) -> Weights | None:
        """Return the distribution that `row`, which is not greedy, samples from; None where nothing of it is finite."""
        logits_1C = np.array(logits_RV[row.row : row.row + 1, :], dtype=np.float32)
        logits_1C = _apply(_used(self._edits, [row]), logits_1C, [row])
        token_ids_C = np.arange(logits_1C.shape[1])
        if _is_narrow(row):
            token_ids_C = np.sort(largest(logits_1C[0, :], row.params.top_k)[1])
            logits_1C = logits_1C[:, token_ids_C]
        logits_1C = _apply(_used(self._truncations, [row]), logits_1C, [row])
        if not np.isfinite(logits_1C.max()):
            return None
        weights_V = np.zeros(logits_RV.shape[1], dtype=np.float32)
        weights_V[token_ids_C] = integer_weights(logits_1C)[0, :]
        return weights_V

    def _decide(self, logits_RV: Array, rows: Sequence[SampleRow]) -> list[int]:
        """Return the token ids of `rows`, all of one path; NO_TOKEN where processing left nothing finite."""
        xp, logits_GV = array_namespace(logits_RV), _select(logits_RV, [row.row for row in rows])
        if edits := _used(self._edits, rows):
            logits_GV = _apply(edits, _own(logits_GV), rows)
        if rows[0].params.greedy:
            token_G = xp.argmax(logits_GV, axis=-1)
            finite_G = xp.isfinite(xp.take_along_axis(logits_GV, token_G[:, None], axis=1)[:, 0])
        elif _is_narrow(rows[0]):  # columns are the candidates, no longer the vocabulary
            top_k = max(row.params.top_k for row in rows)
            token_GC = xp.stack([xp.sort(largest(logits_GV[i, :], top_k)[1]) for i in range(len(rows))])
            column_G, finite_G = self._random_sample(xp.take_along_axis(logits_GV, token_GC, axis=1), rows)
            token_G = xp.take_along_axis(token_GC, column_G[:, None], axis=1)[:, 0]
        else:
            token_G, finite_G = self._random_sample(logits_GV if edits else _own(logits_GV), rows)
        return xp.where(finite_G, token_G, NO_TOKEN).tolist()

    def _random_sample(self, logits_GC: Array, rows: Sequence[SampleRow]) -> tuple[Array, Array]:
        """Sample columns int64 [G] of logits whose edits are done, and tell which may be used; writes to the logits."""
        xp = array_namespace(logits_GC)
        columns: list[Array] = []
        finite: list[Array] = []
        step = max(1, _MAX_SAMPLED // logits_GC.shape[1])
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            logits_SC = _apply(_used(self._truncations, some), logits_GC[begin : begin + step, :], some)
            words = [random_word(row.seed, row.num_output) for row in some]
            finite.append(xp.isfinite(xp.max(logits_SC, axis=-1)))
            inside_SC = logits_SC > -math.inf
            if step == 1 and 0 < int(xp.count_nonzero(inside_SC)) < _FEW:
                (inside_N,) = xp.nonzero(inside_SC[0, :])
                columns.append(inside_N[random_sample(logits_SC[:, inside_N], words)])
            else:
                columns.append(random_sample(logits_SC, words))
        return xp.concat(columns), xp.concat(finite)


def _sampled(seq_id: int, token_id: int, logprob: TokenLogprob | None = None) -> SampledToken:
    return SampledToken(seq_id, token_id, logprob, NOT_FINITE if token_id == NO_TOKEN else None)


def _metadata(rows: Sequence[SampleRow]) -> SamplingMetadata:
    params = [row.params for row in rows]
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    mask_row = np.full(len(rows), -1, dtype=np.int64)
    mask_row[masked] = range(len(masked))
    masks = [mask for row in rows if (mask := row.allowed) is not None]
    return SamplingMetadata(
        logit_row=np.array([row.row for row in rows], dtype=np.int64),
        temperature=np.array([0.0 if p.greedy else p.temperature for p in params], dtype=np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        seed=np.array([row.seed % 2**64 for row in rows], dtype=np.uint64),
        num_output=np.array([row.num_output for row in rows], dtype=np.uint64),
        mask_row=mask_row,
        masks_MW=np.array(masks, dtype=np.uint64) if masks else np.empty((0, 0), dtype=np.uint64),
    )


def _go_on(last: Sequence[SampleRow], rows: Sequence[SampleRow]) -> bool:
    """Tell whether the metadata of `rows` differ from those of `last` in nothing but `num_output` and masks."""
    return len(rows) == len(last) and all(
        row.params is before.params
        and row.row == before.row
        and row.seed == before.seed
        and (row.allowed is None) == (before.allowed is None)
        for row, before in zip(rows, last)
    )


def _are_bare(last: Sequence[SampleRow], rows: Sequence[SampleRow]) -> bool:
    """Tell whether `rows` are plain as `last` are, all of them, with the same metadata but for `num_output`."""
    return all(
        row.allowed is None  # a mask does not compare
        and row[6:] == _BARE
        and row.params is before.params
        and row.row == before.row
        and row.seed == before.seed
        and row.num_output >= row.params.min_tokens
        for row, before in zip(rows, last)
    )


def _sound(logits_RV: Array, rows: Sequence[SampleRow], pending: Sequence[int]) -> list[int]:
    """Return those of the `pending` indices whose logits are finite."""
    if not pending:
        return []
    logit_rows = sorted({rows[i].row for i in pending})
    xp = array_namespace(logits_RV)
    maxima_G = xp.max(_select(logits_RV, logit_rows), axis=-1)  # max carries NaN and +inf; -inf if nothing else
    finite = dict(zip(logit_rows, xp.isfinite(maxima_G).tolist()))
    return [i for i in pending if finite[rows[i].row]]


def _same_path(rows: Sequence[SampleRow], sound: Sequence[int]) -> list[list[int]]:
    """Group the indices of `sound` rows: greedy ones, those with few candidates (narrow), the rest by the handful."""
    greedy = [i for i in sound if rows[i].params.greedy]
    narrow = [i for i in sound if not rows[i].params.greedy and _is_narrow(rows[i])]
    wide = [i for i in sound if not rows[i].params.greedy and not _is_narrow(rows[i])]
    by_handful = [wide[start : start + _WIDE_ROWS] for start in range(0, len(wide), _WIDE_ROWS)]
    return [group for group in (greedy, narrow, *by_handful) if group]


def _is_weighed(row: SampleRow) -> bool:
    """Tell whether a row's token is decided by the distribution as such."""
    return row.trial is not None or row.tells_weights or len(row.typical) > 0


def _is_joint(row: SampleRow) -> bool:
    return row.trial is not None and row.trial.joint


def _together(rows: Sequence[SampleRow], drafted: Sequence[int]) -> list[list[int]]:
    """Group the indices of `drafted` rows by what is verified together: rows of a sequence that follow each other."""
    groups: list[list[int]] = []
    for i in drafted:
        if groups and _is_joint(rows[i]) and i == groups[-1][-1] + 1 and rows[i].seq_id == rows[i - 1].seq_id:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _is_narrow(row: SampleRow) -> bool:
    return 0 < row.params.top_k <= _NARROW_K


def _used(processors: Sequence[Processor], rows: Sequence[SampleRow]) -> list[Processor]:
    return [processor for processor in processors if any(processor.uses(row) for row in rows)]


def _apply(processors: Sequence[Processor], logits_GV: Array, rows: Sequence[SampleRow]) -> Array:
    for processor in processors:
        logits_GV = processor.apply(logits_GV, rows)
    return logits_GV


def _select(logits_RV: Array, indices: Sequence[int]) -> Array:
    """Return the given rows; a view where they are consecutive."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        return logits_RV[first : first + len(indices), :]
    xp = array_namespace(logits_RV)
    return xp.take(logits_RV, xp.asarray(indices, device=device(logits_RV)), axis=0)


def _own(logits_GV: Array) -> Array:
    """Return a copy to write to: the raw logits are the caller's, and the log-probabilities still need them."""
    return array_namespace(logits_GV).asarray(logits_GV, copy=True)


def _requested_logprobs(
    logits_RV: Array, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Return, by index into `rows`, the log-probabilities of the decided rows that ask for them."""
    wanted = {
        i: (row.row, token_id, row.params.logprobs)
        for i, (row, token_id) in enumerate(zip(rows, token_ids))
        if row.params.logprobs is not None and token_id != NO_TOKEN
    }
    return dict(zip(wanted, token_logprobs(logits_RV, list(wanted.values())))) if wanted else {}
