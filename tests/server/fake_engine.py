"""An EngineClient without a model: every output counts upwards from the last token of its prompt."""

import asyncio

import numpy as np

from ridgeline.cache.manager import CacheStats, GroupStats
from ridgeline.core.config import Choice
from ridgeline.core.errors import OverloadedError
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineInfo, EngineStats
from ridgeline.engine.journal import Journal
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import FinishReason, Timings
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import GenerationDefaults

VOCAB = 512


def fake_info(**changes: object) -> EngineInfo:
    fields = {
        "model_name": "counter",
        "model_path": "",
        "vocab_size": VOCAB,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "adapters": {"backwards": 1},
        "max_loras": 0,
        "generation": GenerationDefaults(eos_token_ids=(2,), temperature=0.5),
        "seed": 0,
        "embeds": False,
        "pooling": "last",
        "max_unchunked_prompt": None,
        "choices": {
            "backend": Choice("none", "it only counts"),
            "quality": Choice("KL 0.0123 ± 0.0004 bits per token", "to base, of 300 tokens"),
        },
        "weight_bytes": 0,
    }
    return EngineInfo(**(fields | changes))


class FakeEngine:
    """Takes `room` requests at once. Tokens come when `go` is set; `submitted` and `aborted` say what was asked."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None = None, room: int = 8) -> None:
        self.tokenizer = tokenizer
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.go = True
        self.journal = Journal(1, 16)
        self._info = info
        self._room = room
        self._open: set[str] = set()
        self._alive = False
        self._stopped = False

    def start(self) -> None:
        self._alive = True

    def info(self) -> EngineInfo:
        return self._info

    def stats(self) -> EngineStats:
        cache = CacheStats((GroupStats(free=5, cached=2, used=3, total=10),), 7, 70, 32)
        return EngineStats(
            num_running=3,
            num_waiting=4,
            num_preemptions=5,
            num_steps=6,
            cache=cache,
        )

    @property
    def process_id(self) -> None:
        return None

    @property
    def accepting(self) -> bool:
        return self._alive

    def watch(self, step_timeout_s: float) -> None:
        """It never dies."""

    def give_up(self) -> None:
        self.stop()

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def require_room(self, num_requests: int = 1) -> None:
        if not self._alive or len(self._open) + num_requests > self._room:
            raise OverloadedError("no room")

    def submit(self, *requests: Request) -> None:
        self.require_room(len(requests))
        self.submitted.extend(requests)
        self._open.update(request.request_id for request in requests)

    def abort(self, request_id: str) -> None:
        if request_id in self._open:
            self._open.remove(request_id)
            self.aborted.append(request_id)

    async def stream(self, *requests: Request, whole: bool = False):
        self.submit(*requests)
        try:
            for request in requests:
                for index in range(request.params.n):
                    async for delta in self._answer(request, index):
                        yield delta
                self._open.remove(request.request_id)
        finally:
            for request in requests:
                self.abort(request.request_id)

    async def _answer(self, request: Request, index: int):
        if request.pooling is not None:
            vector_H = np.full(3, request.prompt_ids[-1], dtype=np.float32)
            yield OutputDelta(request.request_id, index, vector_H=vector_H)
            return
        for number in range(1, request.max_tokens + 1):
            while not self.go and not self._stopped:
                await asyncio.sleep(0.002)
            if self._stopped:
                raise OverloadedError("stopped")
            delta = OutputDelta(request.request_id, index)
            delta.token_ids = [(request.prompt_ids[-1] + number) % VOCAB]
            delta.text = f" {delta.token_ids[0]}"
            if number == request.max_tokens:
                timings = Timings(queue_s=0.0, ttft_s=0.25, tpot_s=None, latency_s=0.5, num_preemptions=0)
                delta.finish = Finish(reason=FinishReason.LENGTH, timings=timings, num_cached_tokens=0)
            yield delta

    async def drain(self, timeout_s: float) -> bool:
        self._alive = False
        return not self._open

    def stop(self) -> None:
        self._alive = False
        self._stopped = True
