"""EngineClient: an engine as a server sees it, wherever it runs. Plain data in, plain data out, no torch."""

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ridgeline.cache.manager import CacheStats
from ridgeline.core.config import Choice
from ridgeline.core.errors import EngineError
from ridgeline.core.params import PoolingKind
from ridgeline.core.step import DraftStats, Vectors
from ridgeline.decoding.request import Request
from ridgeline.engine.journal import Journal
from ridgeline.engine.outputs import OutputDelta
from ridgeline.weights.folder import GenerationDefaults

if TYPE_CHECKING:  # it waits on an event loop, which a program without a server never imports
    from ridgeline.engine.adapters import Adapters

CAUSES = ("hang", "killed", "crash", "exit")  # of the end of an engine's process; killed: by SIGKILL, as for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """All that a front end needs to check and complete requests; only adapters change while an engine runs."""

    model_name: str  # as it was asked for
    model_path: str  # its folder or file
    vocab_size: int
    max_model_len: int  # tokens of prompt and output
    max_num_seqs: int
    adapters: dict[str, int]  # numbers of the LoRA adapters that are loaded now, by name
    max_loras: int  # adapters that may be loaded as it runs; 0: none may
    generation: GenerationDefaults
    seed: int  # begins the stream of seeds of requests that bring none
    embeds: bool  # gives vectors instead of tokens
    pooling: PoolingKind  # how a text's vectors become one where a request does not say
    dimensions: tuple[int, ...] | None = None  # to which vectors may be cut; (): any; None: they were not trained so
    labels: tuple[str, ...] = ()  # of a model whose vectors are their logits
    num_types: int = 1  # of tokens; the ids of type i are i times vocab_size further on
    max_unchunked_prompt: int | None  # masked diffusion and encoders attend over whole prompts: what fits in a step
    choices: Mapping[str, Choice]  # every automatic setting by name, with its reason
    weight_bytes: int  # in memory


@dataclass(slots=True)
class PricedSteps:
    """Sums over steps that were priced as they ran: three numbers, beside what they computed and moved."""

    bytes_per_s: Mapping[str, float]  # what memory and the cache give at most
    flops_per_s: Mapping[str, float]  # what arithmetic is possible at most, by the type of its inputs
    speed: dict[str, float] = field(default_factory=dict[str, float])  # of late, where steps are calibrated
    num_steps: int = 0
    measured_s: float = 0.0
    error_s: float = 0.0  # of the predictions, without their signs
    flops: float = 0.0
    predicted_s: dict[str, float] = field(default_factory=dict[str, float])  # by provenance
    limit_s: dict[str, float] = field(default_factory=dict[str, float])  # by what bounds it
    num_bytes: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of now; `num_preemptions` and all below it count since the start."""

    num_running: int  # sequences that hold cache blocks
    num_waiting: int  # sequences in the queue
    num_preemptions: int
    num_steps: int
    cache: CacheStats
    num_recomputed_tokens: int = 0  # of sequences whose blocks were taken
    idle_s: float = 0.0  # with nothing to do
    drafts: Mapping[str, DraftStats] | None = None  # by method; None: nothing is drafted
    draft_gain: float | None = None  # times the throughput without drafts, lately; None: not known
    running_adapters: Mapping[int, int] = field(default_factory=dict[int, int])  # requests, by adapter
    open_adapters: Mapping[int, int] = field(default_factory=dict[int, int])  # with those that wait
    num_stalls: int = 0  # times that a stream's reader fell behind, and its request was held
    silence_s: float = 0.0  # since a process of its own was heard of
    restarts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))  # of its own process
    num_hangs: int = 0  # of them
    op_s: Mapping[str, float] | None = None  # by kind of op, of one step a second
    priced: PricedSteps | None = None  # None: the machine's ceilings or the model's steps are not known

    @property
    def num_restarts(self) -> int:
        """How often a process of its own was started again; the new one counts all else from 0."""
        return sum(self.restarts.values())


def by_adapter(requests: Iterable[Request]) -> Mapping[int, int]:
    """Count requests by the number of their adapter; those without are left out."""
    return Counter(each.adapter for each in {each.request_id: each for each in requests}.values() if each.adapter)


class EngineClient(Protocol):
    """Takes requests and streams their outputs. Everything is called on one event loop, except `stop`."""

    adapters: "Adapters"  # those of `info`, to load and unload

    def start(self) -> None:
        """Start to compute. Call it once, on the running event loop that will read the outputs."""
        ...

    def info(self) -> EngineInfo:
        """Return what the engine serves; known before `start`."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's counts; those of one moment may differ by a step."""
        ...

    @property
    def process_id(self) -> int | None:
        """Its process; None between two, and where it is this one."""
        ...

    @property
    def journal(self) -> Journal:
        """Holds what the engine did in its last steps."""
        ...

    def write_journal(self, path: Path) -> None:
        """Write what the journal still has as a file of `--journal`; any thread."""
        ...

    @property
    def accepting(self) -> bool:
        """False once a shutdown has begun, and while the engine is dead or does not react."""
        ...

    def watch(self, step_timeout_s: float) -> str | None:
        """Look ten times a second for a death, and a step above `step_timeout_s`; return why the server must end."""
        ...

    def give_up(self) -> None:
        """End all open streams with OverloadedError; `stop` waits for the engine, which hangs, no more."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests whose outputs are still being read."""
        ...

    def stream(self, *requests: Request, whole: bool = False) -> AsyncGenerator[OutputDelta, None]:
        """Queue `requests`, whose ids are new, and yield the deltas of all their outputs until each has finished.

        `whole`: they are not told of on the way, and may come a few at a time.

        Closing the generator aborts what has not. Raises OverloadedError at the first delta where the engine takes no
        more, and later if it stops before all have finished.
        """
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the open ones; True if all of them finished in time."""
        ...

    def stop(self) -> None:
        """End the engine after its current step; open streams raise EngineError. Idempotent, from any thread."""
        ...


async def embed(engine: EngineClient, *requests: Request) -> list[Vectors]:
    """Return the vectors, float32 [H], of requests made by `Intake.embedding`, in order; cancelling aborts them.

    Raises as `stream` does, and EngineError for a text that was not computed.
    """
    vectors: dict[str, Vectors] = {}
    async with aclosing(engine.stream(*requests)) as deltas:
        async for delta in deltas:
            if delta.vector_H is not None:
                vectors[delta.request_id] = delta.vector_H
            elif delta.finish is not None and delta.request_id not in vectors:
                raise EngineError(delta.finish.error or f"the text was not computed: {delta.finish.reason}")
    return [vectors[request.request_id] for request in requests]
