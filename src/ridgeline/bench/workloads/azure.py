"""The Azure LLM inference trace: when production requests came and how long they were; their words are random ids.

Patel et al., "Splitwise" (ISCA 2024), published the trace as CSV: TIMESTAMP, ContextTokens, GeneratedTokens.
"""

import csv
import math
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from ridgeline.bench.workload import BenchRequest, check_random, random_tokens, require
from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Azure:
    """The first `num_requests` rows of the trace; the first arrives at 0.

    `time_scale` multiplies the time between arrivals (0.5: twice the load). `length_scale` multiplies both lengths,
    which are then cut to `max_prompt_tokens` and `max_output_tokens` and are at least 1.
    """

    path: str
    num_requests: int = 1000
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_prompt_tokens: int = 8192
    max_output_tokens: int = 2048
    vocab_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_random(self.seed, self.vocab_size, self.num_requests)
        require(0 < self.time_scale < math.inf, "time_scale", self.time_scale, "more than 0")
        require(0 < self.length_scale < math.inf, "length_scale", self.length_scale, "more than 0")
        require(self.max_prompt_tokens >= 1, "max_prompt_tokens", self.max_prompt_tokens, "1 or more")
        require(self.max_output_tokens >= 1, "max_output_tokens", self.max_output_tokens, "1 or more")

    def requests(self) -> list[BenchRequest]:
        """Read the requests. Raises ConfigError when the file cannot be read as this trace."""
        try:
            with Path(self.path).open(newline="") as file:
                rows = [
                    (datetime.fromisoformat(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                    for row in islice(csv.DictReader(file), self.num_requests)
                ]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot read {self.path} as an Azure trace ({error!r}); "
                "its columns are TIMESTAMP,ContextTokens,GeneratedTokens"
            ) from None
        if not rows:
            raise ConfigError(f"Azure trace {self.path} holds no requests")
        rows.sort(key=lambda row: row[0])
        start = rows[0][0]
        return [
            BenchRequest(
                prompt=random_tokens(self.seed, index, self._length(prompt, self.max_prompt_tokens), self.vocab_size),
                max_tokens=self._length(output, self.max_output_tokens),
                arrival_s=(time - start).total_seconds() * self.time_scale,
            )
            for index, (time, prompt, output) in enumerate(rows)
        ]

    def _length(self, tokens: int, most: int) -> int:
        return min(most, max(1, round(tokens * self.length_scale)))


WORKLOAD = Azure
