"""The engine beside two baselines on the same weights: static batching, and generation without a KV cache.

usage: python -m benchmarks.baselines [--model MODEL] [--workload KIND:option=value,...] [--batch-size N] [--out FOLDER]

The systems take turns. Where there is a choice it favours the baselines, so that what the engine gains is not
overstated. `--system`, given several times, chooses systems; the outputs of all are compared with the first one's.
Generation without a cache needs torch.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from benchmarks.common import option_parser, save
from rich.console import Console

from ridgeline.backends.reference.dense import DenseMemory
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.backends.step import StepOutput
from ridgeline.bench.offline import BenchEngine, OfflineRun, measure, scheduling_cost
from ridgeline.bench.offline_report import print_offline
from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.bench.workload import require
from ridgeline.bench.workloads import parse_workload
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import DTYPES
from ridgeline.core.step import SampledToken, SampleRow
from ridgeline.decoding.request import Request
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.request import FinishReason
from ridgeline.program.op import LOGIT_ROWS, LOGITS, POSITIONS, TOKEN_IDS
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

SYSTEMS = ("engine", "static", "naive")


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
        """Return batches in the order of the requests; all times count from the first one's start."""
        journal = self._bench.engine.loop.journal
        before, start_s = journal.totals(), time.monotonic()
        records: list[RequestRecord] = []
        token_ids: list[list[int]] = []
        slots = 0
        for first in range(0, len(requests), self._batch_size):
            begun_s = time.monotonic() - start_s
            batch = self._bench.run(requests[first : first + self._batch_size])
            records += [_later(record, begun_s, len(records) + k) for k, record in enumerate(batch.log.records)]
            token_ids += batch.token_ids
            slots += len(batch.token_ids) * max(map(len, batch.token_ids))
        duration_s = time.monotonic() - start_s
        return OfflineRun(
            log=RunLog(records=records, duration_s=duration_s, unsent=0),
            token_ids=token_ids,
            scheduling=scheduling_cost(before, journal.totals(), duration_s),
            idle_slot_share=1 - sum(map(len, token_ids)) / max(1, slots),
        )


def _later(record: RequestRecord, begun_s: float, index: int) -> RequestRecord:
    """The record of a request that was there from the start, and whose batch began `begun_s` later."""
    times_s = tuple(time_s + begun_s for time_s in record.chunk_times_s)
    return replace(record, index=index, end_s=record.end_s + begun_s, chunk_times_s=times_s)


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
        start_s = time.monotonic()
        outputs = [self._run_request(index, request, start_s) for index, request in enumerate(requests)]
        log = RunLog(records=[record for record, _ in outputs], duration_s=time.monotonic() - start_s, unsent=0)
        return OfflineRun(log=log, token_ids=[output_ids for _, output_ids in outputs])

    def _run_request(self, index: int, request: Request, start_s: float) -> tuple[RequestRecord, list[int]]:
        begun_s = time.monotonic() - start_s
        output_ids: list[int] = []
        times_s: list[float] = []
        reason, error = FinishReason.LENGTH, None
        while len(output_ids) < request.max_tokens:
            sampled = self._next_token(request, output_ids)
            if sampled.error is not None:
                reason, error = FinishReason.ERROR, sampled.error
                break
            output_ids.append(sampled.token_id)
            times_s.append(time.monotonic() - start_s)
            if sampled.token_id in request.stop_ids:
                reason = FinishReason.STOP
                break
        record = RequestRecord(
            index=index,
            arrival_s=begun_s,
            sent_s=begun_s,
            end_s=time.monotonic() - start_s,
            chunk_times_s=tuple(times_s),
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=0,
            output_tokens=len(output_ids),
            usage_reported=True,
            finish_reason=str(reason),
            error=error,
        )
        return record, output_ids

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


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--workload", default="fixed:num_requests=16,input_tokens=256,output_tokens=64")
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="give several to compare; default: all")
    parser.add_argument("--batch-size", type=int, default=16, help="static: number of requests in a batch")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--name", default="offline")
    options = parser.parse_args()
    bench = BenchEngine(EngineConfig.of(options.model, num_threads=options.threads))
    make = {
        "engine": lambda: bench.run,
        "static": lambda: StaticBatching(bench, options.batch_size).run,
        "naive": lambda: NaiveGeneration(bench).run,
    }
    report = measure(
        bench,
        {name: make[name]() for name in options.system or SYSTEMS},
        parse_workload(options.workload),
        name=options.name,
        repeats=options.repeats,
        warmups=options.warmups,
        temperature=options.temperature,
        on_run=lambda name, run: print(f"{name}: {sum(map(len, run.token_ids))} tokens in {run.log.duration_s:.2f} s"),
    )
    print_offline(Console(), report)
    save(options.out, report)


if __name__ == "__main__":
    main()
