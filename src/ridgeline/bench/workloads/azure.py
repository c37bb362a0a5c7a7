"""The Azure LLM inference trace: when production requests came and how long they were; their words are random ids.

Patel et al., "Splitwise" (ISCA 2024), published the trace as CSV: TIMESTAMP, ContextTokens, GeneratedTokens.
"""

import csv
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from ridgeline.bench.workload import BenchRequest, Workload, random_tokens, vocab_option
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Azure(Workload):
    """Sends the first `num_requests` rows of the trace; the first arrives at 0.

    `time_scale` multiplies the time between arrivals (0.5: twice the load). `length_scale` multiplies both lengths,
    which are then cut to `max_prompt_tokens` and `max_output_tokens` and are at least 1.
    """

    path: str
    num_requests: int = option(1000, low=1)
    time_scale: float = option(1.0, above=0.0)
    length_scale: float = option(1.0, above=0.0)
    max_prompt_tokens: int = option(8192, low=1)
    max_output_tokens: int = option(2048, low=1)
    vocab_size: int = vocab_option()
    seed: int = option(0, low=0)

    def requests(self) -> list[BenchRequest]:
        """Read the requests. Raises ConfigError when the file cannot be read as this trace."""
        try:
            with Path(self.path).open(newline="") as file:
                rows = [
                    (
                        datetime.fromisoformat(row["TIMESTAMP"]),
                        self._length(int(row["ContextTokens"]), self.max_prompt_tokens),
                        self._length(int(row["GeneratedTokens"]), self.max_output_tokens),
                    )
                    for row in islice(csv.DictReader(file), self.num_requests)
                ]
            rows.sort(key=lambda row: row[0])
        except (OSError, KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
            raise ConfigError(
                f"cannot read {self.path} as an Azure trace ({error!r}); "
                "its columns are TIMESTAMP,ContextTokens,GeneratedTokens"
            ) from None
        if not rows:
            raise ConfigError(f"Azure trace {self.path} holds no requests")
        start = rows[0][0]
        return [
            BenchRequest(
                prompt=random_tokens(self.seed, index, num_prompt, self.vocab_size),
                max_tokens=num_output,
                arrival_s=(time - start).total_seconds() * self.time_scale,
            )
            for index, (time, num_prompt, num_output) in enumerate(rows)
        ]

    def _length(self, tokens: int, most: int) -> int:
        return min(most, max(1, round(tokens * self.length_scale)))


WORKLOAD = Azure
