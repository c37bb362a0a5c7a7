"""What the engine is compared with: generation without a KV cache, and static batching. Same program, same weights.

Where there is a choice it favours the baseline, so that what the engine gains is not overstated. Called by the command
line.
"""

from collections.abc import Sequence

import torch

from ridgeline.backends.reference.dense import DenseMemory
from ridgeline.backends.reference.ops import interpret
from ridgeline.backends.step import StepOutput
from ridgeline.bench.offline import BenchEngine, OfflineRun, Recorder
from ridgeline.bench.workload import require
from ridgeline.core.step import SampledToken, SampleRow
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.build import DTYPES
from ridgeline.engine.request import FinishReason, Request
from ridgeline.program.op import LOGIT_ROWS, LOGITS, POSITIONS, TOKEN_IDS
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.loader import load_weights


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
        """Batches in the order of the requests."""
        starts = range(0, len(requests), self._batch_size)
        run = self._bench.run_batches([requests[start : start + self._batch_size] for start in starts])
        lengths = [len(token_ids) for token_ids in run.token_ids]
        batches = [lengths[start : start + self._batch_size] for start in starts]
        slots = sum(len(batch) * max(batch) for batch in batches)
        return OfflineRun(
            log=run.log,
            token_ids=run.token_ids,
            scheduling=run.scheduling,
            idle_slot_share=1 - sum(lengths) / max(1, slots),
        )


class NaiveGeneration:
    """One request after the other, the whole sequence computed again for every token.

    The head is computed for the last position only. The weights are loaded beside the engine's; in the checkpoint's
    own dtype both are views of one mapped file.
    """

    def __init__(self, bench: BenchEngine) -> None:
        model, engine = bench.config.model, bench.engine
        self._program = engine.program
        self._weights = load_weights(
            ModelFolder.open(model.model, model.revision),
            engine.spec,
            engine.program,
            DTYPES[engine.choices["dtype"].value],
        )
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> OfflineRun:
        """Requests in their order."""
        recorder = Recorder(requests)
        for request in requests:
            self._answer(request, recorder)
        return OfflineRun(log=recorder.log(), token_ids=recorder.token_ids())

    def _answer(self, request: Request, recorder: Recorder) -> None:
        output_ids: list[int] = []
        while len(output_ids) < request.max_tokens:
            sampled = self._next_token(request, output_ids)
            if sampled.error is not None:
                recorder.finish(request.request_id, FinishReason.ERROR, error=sampled.error)
                return
            output_ids.append(sampled.token_id)
            recorder.tokens(request.request_id, (sampled.token_id,))
            if sampled.token_id in request.stop_ids:
                recorder.finish(request.request_id, FinishReason.STOP)
                return
        recorder.finish(request.request_id, FinishReason.LENGTH)

    def _next_token(self, request: Request, output_ids: Sequence[int]) -> SampledToken:
        token_ids = [*request.prompt_ids, *output_ids]
        inputs = {
            TOKEN_IDS: torch.tensor(token_ids),
            POSITIONS: torch.arange(len(token_ids)),
            LOGIT_ROWS: torch.tensor([len(token_ids) - 1]),
        }
        memory = DenseMemory(self._program.states, 1, len(token_ids))
        logits_1V = interpret(self._program, self._weights, inputs, memory)[LOGITS]
        row = SampleRow(
            seq_id=0,
            row=0,
            params=request.params,
            seed=request.seed,
            num_output=len(output_ids),
            prompt_ids=request.prompt_ids,
            output_ids=output_ids,
            stop_ids=tuple(request.stop_ids),
        )
        samples, _ = self._sampler.sample(StepOutput(logits_1V), [row])
        return samples[0]
