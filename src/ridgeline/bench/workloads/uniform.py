"""Lengths drawn uniformly, both ends included; the defaults are the offline benchmark of nano-vllm and mini-sglang."""

from dataclasses import dataclass

from ridgeline.bench.workload import BenchRequest, Workload, lengths_rng, random_tokens, require, vocab_option
from ridgeline.core.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Workload):
    """Make random token ids; lengths in and out are independent and uniform in [min, max]."""

    num_requests: int = option(256, low=1)
    input_min: int = option(100, low=1)
    input_max: int = 1024
    output_min: int = option(100, low=1)
    output_max: int = 1024
    vocab_size: int = vocab_option()
    seed: int = option(0, low=0)

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        require(self.input_min <= self.input_max, "input_min", self.input_min, "at most input_max")
        require(self.output_min <= self.output_max, "output_min", self.output_min, "at most output_max")

    def requests(self) -> list[BenchRequest]:
        """Return the requests; a larger number with the same seed begins with the same ones."""
        low, high = (self.input_min, self.output_min), (self.input_max, self.output_max)
        lengths = lengths_rng(self.seed).integers(low, high, size=(self.num_requests, 2), endpoint=True).tolist()
        return [
            BenchRequest(prompt=random_tokens(self.seed, index, length, self.vocab_size), max_tokens=output)
            for index, (length, output) in enumerate(lengths)
        ]


WORKLOAD = Uniform
