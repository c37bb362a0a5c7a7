"""Ridgeline's native CPU kernels; see ridgeline.backends.native"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def runnable_levels() -> list[str]:
    """ISA levels this machine can run, narrowest first."""

def filled_levels() -> list[str]:
    """ISA levels of this build whose code has run to fill a table."""

def best_level() -> str:
    """The widest ISA level that is not an emulation."""

class Matrix:
    """
    A linear layer's packed weights, at an address that the caller keeps alive, as that of `order`: with it, int32 [K], weight k multiplies input order[k].
    """

    def __init__(self, kind: str, input: str, outputs: int, inputs: int, group: int = 0, has_zero_points: bool = False, address: int = 0, order: int = 0) -> None: ...

    def at(self, address: int) -> Matrix:
        """The same matrix, packed at another 64-byte aligned address."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def num_panels(self) -> int: ...

    @property
    def panel_bytes(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def address(self) -> int: ...

def pack(level: str, matrix: Matrix, rows: Annotated[NDArray[numpy.generic], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, zero_points: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, order: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], begin: int, end: int) -> None:
    """
    Packs panels [begin, end): packed output n is rows[order[n]], or zeros where order[n] < 0. The scales of int4_minima are followed by the minima; those of the super kinds are bytes, and behind them are the float16 numbers that they multiply. Releases the GIL.
    """

def pack_words(level: str, matrix: Matrix, words: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, zero_points: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, order: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], begin: int, end: int) -> None:
    """
    As `pack`, of int4 by words uint32 [K / 8, N] of eight inputs each, the first in the low bits; the rows may lie apart. Releases the GIL.
    """

def unpack_output(level: str, matrix: Matrix, output: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]:
    """Packed output `output` as float32 [K]."""

def multiply(level: str, matrix: Matrix, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], *, norm: str = 'none', eps: float = 9.999999974752427e-07, norm_weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, norm_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, epilogue: str = 'store', activation: str = 'silu', softcap: float = 0.0, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, index: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, begin: int = 0, end: int | None = None, exact_batch: bool = False) -> None:
    """
    out = epilogue(norm(x) W^T) for x float32 [M, K], or its rows `index`; out is float32 [M, 32 * num_panels], or [M, 16 * num_panels] for the gate epilogue. Panels [begin, end) only. Releases the GIL.
    """

def cpu_family() -> str:
    """Whose cores these are: amd, zen5, intel or other."""

def variants_of(level: str, matrix: Matrix) -> list[tuple[str, str]]:
    """(choice, variant) for each variant that such matrices have at a level."""

def default_variants(level: str, matrix: Matrix, family: str) -> dict[str, str]:
    """The variant of each choice where nothing was measured."""

def tuned(level: str, matrix: Matrix, variants: Mapping[str, str]) -> Matrix:
    """
    The same matrix, computed by the variants that are named; other choices as the level is made for.
    """

def read_all(level: str, pool: Pool, address: int, num_bytes: int) -> int:
    """
    The exclusive or of the 64-bit words of memory, read by all threads of a pool, each a share.
    """

class KvState:
    """One layer's keys and values at one ISA level, for tests."""

    def __init__(self, level: str, kind: str, num_heads: int, head_dim: int, block_size: int, num_blocks: int, value_dim: int | None = None, values_in_keys: bool = False) -> None: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, keys and values together."""

    def write(self, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], v: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def read(self, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.float32], dict(shape=(None, None, None))], Annotated[NDArray[numpy.float32], dict(shape=(None, None, None))]]:
        """
        Keys [slots, heads, head_dim] and values [slots, heads, value_dim] as float32.
        """

    def copy_block(self, source: int, target: int) -> None: ...

    def attend(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], *, first_row: int, length: int, kv_length: int, table: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], first_token: int = 0, bidirectional_block: int = 1, scale: float, window: int = 0, softcap: float = 0.0, sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, slopes: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, float32: bool = False, splits: int = 1, rows_per_call: int = 0) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None, None))]: ...

class Rows:
    """
    One ISA level's functions of float32 rows, for tests. Each returns a new row.
    """

    def __init__(self, level: str) -> None: ...

    def normalize(self, kind: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]: ...

    def rotate(self, heads: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], cos: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], sin: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], interleaved: bool = False) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C')]:
        """
        Entry i of each head [H, D] against entry i + len(cos), or entry 2i against 2i + 1.
        """

    def add(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]: ...

    def scale(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], factor: float) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]: ...

    def activate(self, function: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], gated: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]: ...

    def softcap(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], cap: float) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]: ...

class Likeliest:
    def __init__(self, level: str, vocab_size: int) -> None: ...

    def of(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], row: int, count: int) -> list[int]:
        """
        So many tokens of the largest of a row's float32 logits [R, W], by logit and then by id; none where not all are finite, or no more of them are there. What else is in the row is what a step left there.
        """

def sample(level: str, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], logit_row: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], temperature: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], top_k: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], top_p: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], min_p: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_output: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], masks: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, trials: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, trial_weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, told: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None) -> list[int]:
    """
    Tokens sampled from rows of float32 logits [R, V] with the columns of backends.step.SamplingMetadata, and a mask for each of them; -1 where a row is not finite. Drafted tokens are verified as backends.step.Trials has them; `told` [rows, V] gets what the other rows are sampled from.
    """

def read_bandwidth(level: str, num_threads: int, buffer_bytes: int, repeats: int) -> list[float]:
    """
    Bytes per second of each of `repeats` reads of a buffer by all threads.
    """

def peak(level: str, kind: str, num_threads: int, seconds: float, repeats: int) -> list[float]:
    """
    Operations per second (a multiply-add is two) of each of `repeats` register-only loops of about `seconds` in all threads; `kind` is f32, bf16, int16, int8 or int4 (8-bit inputs by 4-bit weights).
    """

def scalar_per_cycle(windows: int) -> list[float]:
    """
    Independent additions per cycle of this thread's core, in each of so many windows of some 50 us.
    """

def read_words(level: str, bytes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', writable=False)]) -> int:
    """
    The exclusive or of the 64-bit words of `bytes`: what `read_bandwidth` computes.
    """

class KvMemory:
    def __init__(self, kind: str, num_heads: int, head_dim: int, block_size: int, blocks: int, latent_dim: int | None = None) -> None: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def head_dim(self) -> int:
        """Entries of a key."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values together."""

    def copy_block(self, source: int, target: int) -> None: ...

    def write(self, level: str, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], v: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def read(self, level: str, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], v: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None: ...

class MemoryWarmer:
    """Gives memory its pages before it is used, on a thread of its own."""

    def __init__(self) -> None: ...

    def take(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """
        Begin with pieces, (address, bytes) each; False while busy, and where the system cannot be asked.
        """

    @property
    def busy(self) -> bool: ...

class SuffixIndex:
    """
    Where tokens have stood before in a list of documents, and what followed them.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int, max_documents: int = 1073741824) -> None:
        """
        Matches are as long as one of `lengths`, rising, or longer up to the last; the oldest documents go.
        """

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the open document."""

    def close(self) -> None:
        """End the open document."""

    def find(self, text: Sequence[int], max_tokens: int, factor: float, min_probability: float) -> tuple[list[int], int, float, float] | None:
        """
        Return (tokens, length of the match, agreement on the first, expected number right) of what follows text.
        """

    def find_own(self, max_tokens: int, factor: float, min_probability: float) -> tuple[list[int], int, float, float] | None:
        """Return the same for the open document's own end."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, with one for the end of each."""

    @property
    def num_bytes(self) -> int:
        """Memory."""

class Norm:
    def __init__(self, kind: str = 'none', eps: float = 0.0, weight: int = 0, bias: int = 0, by_head: bool = False) -> None: ...

class AttentionSpec:
    def __init__(self, num_heads: int, scale: float, window: int = 0, softcap: float = 0.0, sinks: int = 0, slopes: int = 0, float32: bool = False) -> None: ...

class Team:
    def __init__(self) -> None: ...

    @property
    def alone(self) -> bool: ...

    def observe(self, seconds: float, held_up: float = 0.0) -> None: ...

class Pool:
    def __init__(self, num_threads: int) -> None: ...

    @property
    def size(self) -> int: ...

class MapGuard:
    """
    Keeps a process alive whose mapped file is cut off: zeros are read then.
    """

    def __init__(self, fd: int, begin: int, bytes: int) -> None: ...

    @property
    def is_cut(self) -> bool: ...

def latent_expands(num_heads: int, latent: int, rope: int, nope: int, value: int, num_tokens: int, kv_length: int) -> bool:
    """Whether latent attention expands the latents for a span, for tests."""

def checksums(parts: Sequence[tuple[int, int]], num_threads: int) -> list[int]:
    """
    64-bit checksums of pieces of memory (address, bytes), for finding damage.
    """

class Tape:
    def __init__(self, level: str, pool: Pool | None, deterministic: bool = False) -> None: ...

    def buffer(self, rows: str, width: int) -> int: ...

    def slice(self, buffer: int, offset: int, width: int) -> int:
        """
        Columns [offset, offset + width) of a buffer, as a buffer: to read, or to write other than by `linear`.
        """

    def embed_packed(self, matrix: Matrix, ids: str, scale: float, out: int, vocab: int = 0) -> None: ...

    def embed_rows(self, rows: int, kind: str, ids: str, scale: float, out: int, vocab: int = 0) -> None: ...

    def rope_angles(self, frequencies: Sequence[float], scale: float, cos: int, sin: int) -> None: ...

    def linear(self, matrix: Matrix, norm: Norm, x: int, out: int | None, select: bool = False, epilogue: str = 'store', activation: str = 'relu', bias: int = 0, softcap: float = 0.0) -> None: ...

    def normalize(self, norm: Norm, x: int, out: int, head_dim: int = 0) -> None: ...

    def add(self, x: int, y: int, out: int) -> None: ...

    def add_row(self, x: int, row: int, out: int) -> None: ...

    def activate(self, function: str, x: int, out: int) -> None: ...

    def gate(self, function: str, x: int, y: int, out: int) -> None: ...

    def scale(self, factor: float, x: int, out: int) -> None: ...

    def lora(self, x: int, y: int, out: int, a: int, b: int, count: int, rank: int) -> None: ...

    def softcap(self, cap: float, x: int, out: int) -> None: ...

    def select(self, x: int, out: int) -> None: ...

    def rotate(self, x: int, out: int, head_dim: int, cos: int, sin: int, interleaved: bool = False, offset: int = 0) -> None: ...

    def heads(self, q: int | None, k: int, v: int, memory: KvMemory, group: int, q_norm: Norm, k_norm: Norm, cos: int | None = None, sin: int | None = None, interleaved: bool = False, offset: int = 0) -> None: ...

    def attention(self, spec: AttentionSpec, memory: KvMemory, group: int, q: int, out: int) -> None: ...

    def gate_rows(self, x: int, gate: int, out: int) -> None: ...

    def sample(self, vocab_size: int) -> None: ...

    def retain(self, buffer: int) -> None:
        """
        Has steps leave its rows behind those of others, where they get a place.
        """

    def run(self, block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], begin: int, end: int, sampled: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')] | None = None, seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')] | None = None, retained: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None, trials: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]] | None = None) -> int:
        """Returns the highest slot written, or 0."""

    def start(self, block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], sampled: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], retained: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None, trials: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]] | None = None) -> None:
        """
        Runs the step on the pool's other threads; its memory is in use until `finish`.
        """

    def follow(self, block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], sampled: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], retained: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None, check: Callable[[], object] | None = None) -> None:
        """
        Has `finish` start this step too, its pending tokens being those that the one before has sampled, and `check`, which must not raise, may have changed.
        """

    def finish(self) -> tuple[int, bool]:
        """
        Finishes the step that was started; returns what `run` does, and whether one that follows was started.
        """

    def view(self, buffer: int, rows: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    @property
    def allocated_bytes(self) -> int:
        """What the steps so far have needed."""

    def workspace_bytes(self, num_tokens: int, num_spans: int, num_rows: int, context: int, num_threads: int) -> int:
        """The most that a step within these limits may need."""

    def __len__(self) -> int: ...

    def chain(self, block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], block_size: int, vocab_size: int, token_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, features: tuple[int, int, Tape, int, int, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]] | None = None, told: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')] | None = None, own_vocab: int = 0) -> int:
        """
        Runs a step, and further ones from what each samples, as many as `lengths` says: runtime/chain.h. Returns the highest slot written, or 0.
        """

    def rounds(self, block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], block_size: int, drafter: tuple[Tape, int, int, Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, int, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], int], features: tuple[int, int, Tape, int, int, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]] | None, tables: Sequence[tuple[Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]]], spans: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], stops: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], hurry: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], token_ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], sampled: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], trials: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]] | None, proposal: int, texts: Sequence[SuffixIndex], lookup: tuple[int, float, float, float, int], told: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> tuple[int, int, int, float, float, float]:
        """
        Runs a step that verifies drafts, and further ones, which a drafter makes drafts for: runtime/rounds.h. Returns how many, the highest slots written in both caches, or 0, their seconds, those of lookups, and those of the step without drafts.
        """

    def looked_up(self, block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], block_size: int, texts: Sequence[SuffixIndex], factor: float, min_probability: float, room: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stops: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], hurry: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], token_ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], sampled: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], taps: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None) -> tuple[int, int, float]:
        """
        Does so with drafts that are looked up in the texts of the spans, with the taps of all rounds; returns how many, the highest slot, and their seconds.
        """

    def route(self, logits: int, ids: int, weights: int, scoring: str, normalize: bool, scale: float, num_groups: int = 1, top_groups: int = 1, group_score: str = 'max', bias: int = 0) -> None: ...

    def experts(self, num_experts: int, gate_up: Matrix, down: Matrix, x: int, ids: int, weights: int, out: int, activation: str, limit: float = 0.0, alpha: float = 0.0, gate_up_bias: int = 0, down_bias: int = 0) -> None: ...

    def latent_write(self, latent: int, key: int, memory: KvMemory, group: int) -> None: ...

    def latent_attention(self, num_heads: int, scale: float, absorb: Matrix, expand: Matrix, memory: KvMemory, group: int, q: int, out: int) -> None: ...

    def causal_conv(self, x: int, out: int, taps: int, weight: int, state: StatePart, bias: int = 0, activation: str | None = None) -> None:
        """`weight` is [taps, channels]."""

    def selective_scan(self, x: int, dt: int, b: int, c: int, out: int, rate: int, skip: int, state: StatePart) -> None: ...

    def recur(self, kind: str, heads: int, key_heads: int, q: int, k: int, v: int, dt: int | None, beta: int | None, out: int, rate: int, state: StatePart, dt_bias: int = 0, skip: int = 0, dt_min: float = 0.0, dt_max: float = float('inf')) -> None: ...

    def gated_norm(self, x: int, z: int, out: int, group: int, eps: float, norm_before_gate: bool, weight: int, shared_weight: bool) -> None: ...

class StatePart:
    """
    One part of a recurrent state: `size` floats a block from `memory` on; from
    `log` on the inputs of `log_rows` tokens a block.
    """

    def __init__(self, memory: int, size: int, group: int, log: int = 0, log_width: int = 0, log_rows: int = 0) -> None: ...
