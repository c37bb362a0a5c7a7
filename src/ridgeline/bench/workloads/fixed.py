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
        streams = range(self.num_requests)
        prompts = [random_tokens(self.seed, stream, self.input_tokens, self.vocab_size) for stream in streams]
        return [BenchRequest(prompt=prompt, max_tokens=self.output_tokens) for prompt in prompts]


WORKLOAD = Fixed
