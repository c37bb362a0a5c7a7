"""The record that the client writes of each request. Written by bench/client.py, read by bench/metrics.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request's times, in seconds since the start of the run, and its counts. A success has no `error`.

    `chunk_times_s` holds the arrival of every chunk that carried tokens; a success has at least one. `end_s` is the
    last chunk with a choice, be it only a finish_reason, or the moment of failure.
    """

    index: int
    arrival_s: float  # when the load wanted it sent
    sent_s: float
    end_s: float
    chunk_times_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int  # of the prompt, as the server reports them; 0 if it does not
    output_tokens: int
    usage_reported: bool  # False: output_tokens counts chunks, prompt_tokens only a prompt of token ids
    finish_reason: str | None
    error: str | None

    @property
    def ttft_s(self) -> float:
        """Time to first token, from sending."""
        return self.chunk_times_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency, from sending to the last chunk."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies as the client sees them: the time between neighbouring chunks."""
        return [late - early for early, late in zip(self.chunk_times_s, self.chunk_times_s[1:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """A whole run: every request that was sent, in order of sending, and how many the time limit left unsent."""

    records: list[RequestRecord]
    duration_s: float  # start of the run to the end of its last request
    unsent: int
