"""Every request has the same length in and out: vLLM's `random` dataset with range ratio 0."""

from dataclasses import dataclass

from ridgeline.bench.workload import BenchRequest, Workload, random_tokens, vocab_option
from ridgeline.core.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Workload):
    """Make `num_requests` prompts of `input_tokens` random ids, each answered with `output_tokens` tokens."""

    num_requests: int = option(100, low=1)
    input_tokens: int = option(512, low=1)
    output_tokens: int = option(128, low=1)
    vocab_size: int = vocab_option()
    seed: int = option(0, low=0)

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
