"""Generation without a KV cache: the other baseline beside `bench/baselines.py`, and the one that needs torch."""

from collections.abc import Sequence

import torch

from ridgeline.backends.reference.dense import DenseMemory
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.backends.step import StepOutput
from ridgeline.bench.offline import BenchEngine, OfflineRun
from ridgeline.bench.recorder import Recorder
from ridgeline.core.dtypes import DTYPES
from ridgeline.core.step import SampledToken, SampleRow
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.request import FinishReason, Request
from ridgeline.program.op import LOGIT_ROWS, LOGITS, POSITIONS, TOKEN_IDS
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights


class NaiveGeneration:
    """Runs one request after the other, the whole sequence computed again for every token.

    The head is computed for the last position only. The weights are loaded beside the engine's; in the checkpoint's
    own dtype both are views of one mapped file.
    """

    def __init__(self, bench: BenchEngine) -> None:
        model, engine = bench.config.model, bench.engine
        self._program = engine.program
        folder, dtype = ModelFolder.open(model.model, model.revision), DTYPES[engine.info.choices["dtype"].value]
        self._weights = as_tensors(load_weights(folder, engine.spec, engine.program, dtype))
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> OfflineRun:
        """Return the requests in their order."""
        recorder = Recorder()
        for request in requests:
            recorder.sent(request, recorder.start_s, recorder.start_s)
            self._run_request(request, recorder)
        return OfflineRun(log=recorder.log(), token_ids=recorder.token_ids())

    def _run_request(self, request: Request, recorder: Recorder) -> None:
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
