"""StepBatch and StepOutput: one step as flat arrays, what every backend receives and gives back.

Made from a StepPlan by `engine/batch.py`; the output is read by the sampler.
Legend: T tokens · S spans · R rows that need logits · D tokens to sample · C copies · G cache groups · V vocabulary
    B blocks that a table has room for · M masks of tokens · W words of a mask · E echoes

All arrays of a StepBatch lie in one block of 8-byte words, which can go to a device or another process as it is:

    version · T · S · R · D · C · G · adapters? · M · W · E · B of each group │ the arrays of StepBatch in order

`native/bind/step.cpp` reads the same words.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array
from ridgeline.core.config import Choice
from ridgeline.core.step import Rounds
from ridgeline.cost.efficiency import OpTiming
from ridgeline.program.op import ADAPTERS, LOGIT_ROWS, POSITIONS, TOKEN_IDS

IntArray = npt.NDArray[np.int64]

BLOCK_VERSION = 3  # another order or meaning of the words is another version
HEADER_WORDS = 11


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that a step's arrays have."""

    num_tokens: int
    num_spans: int = 0
    num_rows: int = 0
    num_sample_rows: int = 0
    num_copies: int = 0
    has_adapters: bool = False
    table_widths: tuple[int, ...] = ()  # [G]
    masks: tuple[int, int] = (0, 0)  # M, W
    num_echoes: int = 0

    @property
    def num_words(self) -> int:
        """Return the length of the block."""
        num_groups = len(self.table_widths)
        by_token = (2 + self.has_adapters + num_groups) * self.num_tokens
        by_span = (4 + num_groups + sum(self.table_widths)) * self.num_spans
        by_echo = (1 + num_groups) * self.num_echoes
        by_row = (
            by_echo + self.num_rows + 3 * self.num_copies + 7 * self.num_sample_rows + self.masks[0] * self.masks[1]
        )
        return HEADER_WORDS + num_groups + by_token + by_span + by_row


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Where one cache group reads and writes in this step. A slot is block * block_size + offset.

    In a recurrent group a table is one block, the state of the span's sequence, and a slot is that block, or -1 for the
    tokens of a span that go into the block's log alone. `first_token_S` is how many tokens before the span are there.
    """

    write_slots_T: IntArray
    first_token_S: IntArray  # position of the first token of each table
    tables_SB: IntArray  # block ids, padded with 0
    echo_slots_E: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Tokens that a backend may decide within the step, by the rules of `ridgeline.decoding`; each array is [D].

    Only what needs nothing but the row's logits is here. top_p and min_p are float64, as the rules compare them.
    """

    logit_row: IntArray  # index into the R rows
    temperature: npt.NDArray[np.float32]  # 0: greedy
    top_k: npt.NDArray[np.int32]  # 0: off
    top_p: npt.NDArray[np.float64]  # 1: off
    min_p: npt.NDArray[np.float64]  # 0: off
    seed: npt.NDArray[np.uint64]
    num_output: npt.NDArray[np.uint64]
    mask_row: IntArray  # index into the masks, -1: every token is allowed
    masks_MW: npt.NDArray[np.uint64]  # bit i % 64 of word i // 64 allows token i
    open_masks: dict[int, bool] = field(default_factory=dict[int, bool])  # those that are known to allow all


class Trials(NamedTuple):
    """Drafted tokens that rows of `SamplingMetadata` verify, by the rules of `ridgeline.decoding.rejection`.

    Each is the row, the token, and how many rows from this one on are verified together: 0 for a token of its own, -1
    in all but the first of these rows, which follow each other.
    """

    rows_K3: IntArray
    weights_KV: npt.NDArray[np.float32]  # what each was sampled from


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Spans laid end to end, as views into `block`. `kv_length_S` is each sequence's length once the step has run.

    What is stored of a token may be stored a second time, for another span to find among its own: `echo_rows_E` are
    such tokens, in order, and each group has their slots. It is in place before anything of that span is.
    `trials` lie beside the block.
    """

    block: IntArray
    token_ids_T: IntArray
    positions_T: IntArray
    adapters_T: IntArray | None  # number of each token's adapter, 0 for none; None: no token has one
    logit_rows_R: IntArray
    span_start_S: IntArray  # offset of each span in T
    span_length_S: IntArray
    kv_length_S: IntArray
    bidirectional_block_S: IntArray
    groups: Sequence[GroupStep]
    copies_C3: IntArray  # (group, source block, target block), copied in this order before anything is written
    sampling: SamplingMetadata
    echo_rows_E: IntArray
    trials: Trials | None = None

    @classmethod
    def lay_out(cls, memory: IntArray, shape: StepShape) -> "StepBatch":
        """Return arrays of `shape`, to be filled, at the front of `memory`, which has `shape.num_words` words or more.

        `memory` is a row of int64 of anything that can be shared: plain, pinned or mapped.
        """
        sizes = (shape.num_tokens, shape.num_spans, shape.num_rows, shape.num_sample_rows, shape.num_copies)
        flags = (len(shape.table_widths), int(shape.has_adapters))
        header = (BLOCK_VERSION, *sizes, *flags, *shape.masks, shape.num_echoes, *shape.table_widths)
        memory[: len(header)] = header
        return cls.view(memory[: shape.num_words])

    @classmethod
    def view(cls, block: IntArray) -> "StepBatch":
        """Return the arrays of a block as its header gives them; what is written to them is written to the block."""
        words = _Words(block)
        version, *sizes = words.take(HEADER_WORDS).tolist()
        assert version == BLOCK_VERSION, f"a step's block of version {version}, and this is {BLOCK_VERSION}"
        num_tokens, num_spans, num_rows, num_sample_rows, num_copies, num_groups, has_adapters, *masks, num_echoes = (
            sizes
        )
        widths = words.take(num_groups).tolist()
        batch = cls(
            block=block,
            token_ids_T=words.take(num_tokens),
            positions_T=words.take(num_tokens),
            adapters_T=words.take(num_tokens) if has_adapters else None,
            logit_rows_R=words.take(num_rows),
            span_start_S=words.take(num_spans),
            span_length_S=words.take(num_spans),
            kv_length_S=words.take(num_spans),
            bidirectional_block_S=words.take(num_spans),
            groups=[_group(words, num_tokens, num_spans, num_echoes, width) for width in widths],
            copies_C3=words.take(3 * num_copies).reshape(num_copies, 3),
            sampling=_sampling(words, num_sample_rows, masks),
            echo_rows_E=words.take(num_echoes),
        )
        assert words.taken == len(block), f"a step's block has {len(block)} words, and its header says {words.taken}"
        return batch

    def spans(self) -> list[slice]:
        """Return the rows of T that each span has."""
        return [slice(start, start + length) for start, length in zip(self.span_start_S, self.span_length_S)]

    def inputs(self) -> Mapping[str, IntArray]:
        """Return the inputs of a program by name; its adapters are zeros where no token has one."""
        adapters_T = np.zeros_like(self.token_ids_T) if self.adapters_T is None else self.adapters_T
        arrays = (self.token_ids_T, self.positions_T, adapters_T, self.logit_rows_R)
        return dict(zip((TOKEN_IDS, POSITIONS, ADAPTERS, LOGIT_ROWS), arrays))


class _Words:
    """Takes arrays off the front of a block."""

    def __init__(self, block: IntArray) -> None:
        self._block = block
        self.taken = 0

    def take(self, count: int) -> IntArray:
        begin, self.taken = self.taken, self.taken + count
        return self._block[begin : self.taken]


def _group(words: _Words, num_tokens: int, num_spans: int, num_echoes: int, width: int) -> GroupStep:
    counts = (num_tokens, num_spans, num_spans * width, num_echoes)
    slots_T, first_token_S, tables, echo_slots_E = (words.take(count) for count in counts)
    return GroupStep(slots_T, first_token_S, tables.reshape(num_spans, width), echo_slots_E)


def _sampling(words: _Words, count: int, masks: Sequence[int]) -> SamplingMetadata:
    """Return the sampling parameters of `count` rows; a temperature and a top_k share a word."""
    num_masks, mask_words = masks
    logit_row, pairs = words.take(count), words.take(count).view(np.int32).reshape(count, 2)
    return SamplingMetadata(
        logit_row=logit_row,
        temperature=pairs[:, 0].view(np.float32),
        top_k=pairs[:, 1],
        top_p=words.take(count).view(np.float64),
        min_p=words.take(count).view(np.float64),
        seed=words.take(count).view(np.uint64),
        num_output=words.take(count).view(np.uint64),
        mask_row=words.take(count),
        masks_MW=words.take(num_masks * mask_words).view(np.uint64).reshape(num_masks, mask_words),
    )


Likeliest = Callable[[int, int], Sequence[int]]  # lists, of a row of logits, so many tokens of the largest, in order


class StepOutput(NamedTuple):
    """The values that a step has computed. The logits are good until the executable's next step.

    `sampled_token_ids` has one token per row of the batch's `sampling`, -1 where the logits were not finite (NaN or
    +inf anywhere, or -inf everywhere); it is None from a backend that leaves every token to the sampler.
    """

    logits_RV: Array  # float32; numpy from backends that compute on CPUs
    sampled_token_ids: IntArray | None = None
    likeliest: Likeliest | None = None
    taps_TW: Array | None = None  # the program's, float32, side by side


class Executable(Protocol):
    """Runs a program bound to weights and cache memory."""

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights in memory."""
        ...

    def run(self, step: StepBatch, features_TW: Array | None = None) -> StepOutput:
        """Compute the step and update the cache; `features_TW` are those that the program reads."""
        ...

    def timed(self, step: StepBatch) -> tuple[StepOutput, Iterable[OpTiming]]:
        """Do as `run`, and return how long each part of it took, to be read once; slower by what the clock costs."""
        ...

    def adapter_factors(self, name: str) -> Array:
        """Return the memory of a weight of an op `lora`, in the program's shape, for others to be written to it."""
        ...

    def facts(self) -> Mapping[str, Choice]:
        """Return what profiles say beside the choices of a start, because finding it out takes time."""
        ...


Check = Callable[[StepOutput], None]


@runtime_checkable
class Overlapping(Executable, Protocol):
    """An Executable that computes a step while the calling thread does something else."""

    @property
    def overlaps(self) -> bool:
        """Whether it has threads for that beside the calling one."""
        ...

    def start(self, step: StepBatch) -> None:
        """Do as `run`, up to `finish`; the step's arrays, and logits, are in use until then."""
        ...

    def follow(self, step: StepBatch, *, check: Check | None = None) -> bool:
        """Make `finish` start this step as soon as the one that was started ends; return False where that cannot be.

        It has one token for each that the other samples, in the same order: where one is PENDING it is that token. The
        logits of both are in use until it is finished. `check` may change the other's tokens before that.
        """
        ...

    def finish(self) -> tuple[StepOutput, bool]:
        """Return what was computed in the step that was started, and whether the step that follows was started."""
        ...


class ChainEnds(NamedTuple):
    """Says what the sampled ids mean: `token_ids_V` instead of themselves; a token from `vocab_size` on ends a row.

    `fold` computes what the first step reads of its features.
    """

    vocab_size: int
    token_ids_V: IntArray | None = None
    fold: "Chaining | None" = None


class RoundsOutput(NamedTuple):
    """Holds the tokens of each round of a step, -1 where nothing was drafted, what was sampled from each of their rows,
    and the taps of the last round; of all that there could be, one after the other, where drafts are looked up.

    A round of a single span amid those of a model may have other drafts, looked up behind so long a match: `told_R` has
    its number of tokens and that match. -1 - the match where the model drafted in spite of it; 0: nobody looked.
    """

    token_ids_RT: IntArray
    sampled_RT: IntArray
    taps_TW: Array | None = None
    told_R: IntArray | None = None  # [R, 2]
    seconds: float = 0.0
    lookup_s: float = 0.0  # of the rounds that were looked up amid a model's
    plain_s: float = 0.0  # of the one that had no drafts


class Chained(NamedTuple):
    """Holds what a chain of steps has sampled, -1 from where a row's tokens end, and what from where that was asked."""

    token_ids_KD: IntArray
    weights_KDV: npt.NDArray[np.float32] | None = None


@runtime_checkable
class Chaining(Executable, Protocol):
    """An Executable that goes on by itself with the tokens that it samples."""

    def chain(
        self, step: StepBatch, lengths_D: IntArray, ends: ChainEnds, features_TW: Array | None, *, tells: bool
    ) -> Chained:
        """Compute a step, then further ones from what each samples.

        The rows to sample are of the last tokens of some spans, in order. `lengths_D`: of how many tokens each is the
        first, the longest first; the tables have blocks for all. `features_TW` are for the first step, later steps
        read its tap.
        """
        ...


@runtime_checkable
class Telling(Executable, Protocol):
    """An Executable that tells the taps of a program only where somebody listens."""

    def tell_taps(self, asked: bool) -> None:
        """Tell them from the next step on that is laid out, or no longer: at first it does. Rounds always tell them."""
        ...


@runtime_checkable
class Rounding(Executable, Protocol):
    """An Executable that goes on by itself with what a drafter drafts behind the tokens that it verifies."""

    @property
    def goes_on(self) -> bool:
        """Whether steps over its memory may have several rounds."""
        ...

    def goes_on_with(self, drafter: Executable, ends: ChainEnds) -> bool:
        """Take what drafts from now on, over a cache of its own; return False where steps have one round with it."""
        ...

    def rounds(self, step: StepBatch, rounds: Rounds, hurry: IntArray) -> RoundsOutput:
        """Compute a step, and further ones that verify what is drafted behind what came of each.

        Each token has a row of logits, which samples by the row's metadata alone. No round begins where `hurry` [1],
        which any thread writes, is not 0.
        """
        ...
