"""Say what a caller asked for, as strategies and drafts see it: checked, and with every default resolved."""

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.params import PoolingParams, SamplingParams
from ridgeline.text.grammar import Grammar

SLOTS = 2**12  # more than there are places for adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request: `params.max_tokens` is resolved, `deadline_s` is on the engine's monotonic clock.

    With `pooling` it asks for a vector instead of tokens.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    arrival_s: float
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    priority: int = 0  # lower runs first
    background: bool = False  # makes way for all that is not, whatever its priority
    deadline_s: float | None = None
    client: int = 0  # whose it is: the waiting queue is fair between clients
    call: int = 0  # number of the client's request that this is a prompt of: those share its slots; 0: it is all of it
    adapter: int = 0  # number of the LoRA adapter, by SLOTS its place from 1; 0: the model as it is
    pooling: PoolingParams | None = None
    grammar: Grammar | None = None  # what the outputs must follow
    salt: str = ""  # prefixes are shared only among requests of equal salt
    shown_ids: frozenset[int] = frozenset()  # special tokens that the text has all the same
    length_penalty: float | None = None  # of a beam search for `params.n` outputs; None: they are sampled
    prediction_ids: Sequence[int] = ()  # what the caller expects the output to be, mostly; a source of drafts
