"""Mooncake's trace: prompts named by the hashes of their 512-token blocks, so prefixes are shared as in production.

Qin et al., "Mooncake" (FAST 2025). Equal hash, equal tokens: what a prefix cache could hit there, it can hit here.
"""

from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import msgspec

from ridgeline.bench.workload import BenchRequest, Workload, random_tokens, vocab_option
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import option

TRACE_BLOCK_TOKENS = 512


class _Row(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: Annotated[int, msgspec.Meta(lt=2**32)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mooncake(Workload):
    """Sends the first `num_requests` lines of the trace; the first arrives at 0.

    `time_scale` multiplies the time between arrivals. `length_scale` shrinks the blocks and both lengths alike, and
    `max_prompt_tokens` cuts the end of a prompt, so neither changes which prefixes are shared.
    """

    path: str
    num_requests: int = option(100, low=1)
    time_scale: float = option(1.0, above=0.0)
    length_scale: float = option(1.0, low=1 / TRACE_BLOCK_TOKENS)
    max_prompt_tokens: int = option(131072, low=1)
    max_output_tokens: int = option(2048, low=1)
    vocab_size: int = vocab_option()
    seed: int = option(0, low=0)

    def requests(self) -> list[BenchRequest]:
        """Read the requests. Raises ConfigError when the file cannot be read as this trace."""
        decoder = msgspec.json.Decoder(_Row)
        try:
            with Path(self.path).open("rb") as file:
                rows = [decoder.decode(line) for line in islice(file, self.num_requests)]
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {self.path} as a Mooncake trace: {error}") from None
        if not rows:
            raise ConfigError(f"Mooncake trace {self.path} holds no requests")
        for number, row in enumerate(rows, start=1):
            if not 1 <= row.input_length <= len(row.hash_ids) * TRACE_BLOCK_TOKENS:
                raise ConfigError(
                    f"{self.path}, line {number}: {row.input_length} tokens do not fit {len(row.hash_ids)} blocks"
                )
        rows.sort(key=lambda row: row.timestamp)
        return [
            BenchRequest(
                prompt=self._prompt(row),
                max_tokens=min(self.max_output_tokens, max(1, round(row.output_length * self.length_scale))),
                arrival_s=(row.timestamp - rows[0].timestamp) / 1000 * self.time_scale,
            )
            for row in rows
        ]

    def _prompt(self, row: _Row) -> list[int]:
        """Return the blocks one after the other, cut to the prompt's length; a hash id is its block's random stream."""
        block_tokens = round(TRACE_BLOCK_TOKENS * self.length_scale)
        length = min(self.max_prompt_tokens, max(1, round(row.input_length * self.length_scale)))
        ids = row.hash_ids[: -(-length // block_tokens)]
        blocks = (random_tokens(self.seed, hash_id, block_tokens, self.vocab_size) for hash_id in ids)
        return list(islice(chain.from_iterable(blocks), length))


WORKLOAD = Mooncake
