"""Static batching, which the engine is compared with: the same program, the same weights.

Where there is a choice it favours the baseline, so that what the engine gains is not overstated. Called by the command
line. Generation without a KV cache is in `bench/naive.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.bench.offline import BenchEngine, OfflineRun
from ridgeline.bench.workload import require
from ridgeline.engine.request import Request


class StaticBatching:
    """Batches of up to `batch_size` through the engine; nothing is admitted until the longest member has ended.

    The slot of a member that ended stays empty. The engine computes nothing for it, where padding would.
    """

    def __init__(self, bench: BenchEngine, batch_size: int) -> None:
        limit = bench.config.scheduler.max_num_seqs
        require(1 <= batch_size <= limit, "batch_size", batch_size, f"in 1..{limit} (max_num_seqs)")
        self._bench = bench
        self._batch_size = batch_size

    def run(self, requests: Sequence[Request]) -> OfflineRun:
        """Return batches in the order of the requests."""
        starts = range(0, len(requests), self._batch_size)
        run = self._bench.run_batches([requests[start : start + self._batch_size] for start in starts])
        lengths = [len(token_ids) for token_ids in run.token_ids]
        batches = [lengths[start : start + self._batch_size] for start in starts]
        slots = sum(len(batch) * max(batch) for batch in batches)
        return replace(run, idle_slot_share=1 - sum(lengths) / max(1, slots))
