"""Ask with a few long prefixes, each asked again with fresh suffixes: vLLM's `prefix_repetition`, the test of a prefix
cache.
"""

from dataclasses import dataclass

from ridgeline.bench.workload import BenchRequest, Workload, lengths_rng, random_tokens, require, vocab_option
from ridgeline.core.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix(Workload):
    """`num_prefixes` prefixes, shared evenly by the requests (the first ones take the rest), shuffled."""

    num_requests: int = option(100, low=1)
    num_prefixes: int = 10
    prefix_tokens: int = option(256, low=0)
    suffix_tokens: int = option(256, low=1)
    output_tokens: int = option(128, low=1)
    vocab_size: int = vocab_option()
    seed: int = option(0, low=0)

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        limit = f"in 1..{self.num_requests} (num_requests)"
        require(1 <= self.num_prefixes <= self.num_requests, "num_prefixes", self.num_prefixes, limit)

    def requests(self) -> list[BenchRequest]:
        """Draw prefixes from streams 0..num_prefixes-1, suffixes from the later ones."""

        def tokens(stream: int, count: int) -> list[int]:
            return random_tokens(self.seed, stream, count, self.vocab_size)

        prefixes = [tokens(index, self.prefix_tokens) for index in range(self.num_prefixes)]
        order = lengths_rng(self.seed).permutation(self.num_requests).tolist()
        pairs = ((prefixes[i % self.num_prefixes], tokens(self.num_prefixes + i, self.suffix_tokens)) for i in order)
        return [BenchRequest(prompt=prefix + suffix, max_tokens=self.output_tokens) for prefix, suffix in pairs]


WORKLOAD = SharedPrefix
