"""Every request has the same length in and out: vLLM's `random` dataset with range ratio 0."""

from dataclasses import dataclass

from ridgeline.bench.workload import BenchRequest, check_random, random_tokens, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """`num_requests` prompts of `input_tokens` random ids, each answered with `output_tokens` tokens."""

    num_requests: int = 100
    input_tokens: int = 512
    output_tokens: int = 128
    vocab_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_random(self.seed, self.vocab_size, self.num_requests)
        require(self.input_tokens >= 1, "input_tokens", self.input_tokens, "1 or more")
        require(self.output_tokens >= 1, "output_tokens", self.output_tokens, "1 or more")

    def requests(self) -> list[BenchRequest]:
        """Return prompts that share no prefix but by chance."""
        return [
            BenchRequest(
                prompt=random_tokens(self.seed, index, self.input_tokens, self.vocab_size),
                max_tokens=self.output_tokens,
            )
            for index in range(self.num_requests)
        ]


WORKLOAD = Fixed
