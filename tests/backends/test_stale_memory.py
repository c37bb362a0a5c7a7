"""What an earlier sequence left in the cache never reaches a later one, whatever it is."""

import numpy as np
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.backends.reference.paged import ReferenceExecutable


def soil(executable, rubbish):
    """Fills every block that an earlier sequence could have written."""
    if isinstance(executable, ReferenceExecutable):
        for memories in executable._memories.values():
            for memory in memories:
                memory[:-1] = rubbish
    else:
        for memory in executable._cache.blocks:
            memory.view(np.float32)[:] = rubbish


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(
    ("backend", "kv_dtype"),
    [("reference", "auto"), ("reference", "int4"), *(("native", kind) for kind in ("float32", "int8", "fp8", "int4"))],
)
def test_rubbish_in_unwritten_slots_changes_nothing(shared_data, backend, kv_dtype, rubbish):
    if backend == "native":
        pytest.importorskip("ridgeline._native", reason="the native module is not built")
    llm = LLM(
        str(shared_data / "models/stories260K"),
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=64,
        kv_cache_bytes=4_000_000,
        backend=backend,
        kv_dtype=kv_dtype,
    )
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=0, n=2)
    prompts = ["Once upon a time", "Lily", "One day a cat and a dog went to the park to play"]
    clean = llm.generate(prompts, params, use_tqdm=False)

    llm.engine.loop.scheduler.cache.reset_prefix_cache()
    soil(llm.engine.loop._executor._executable, rubbish)
    dirty = llm.generate(prompts, params, use_tqdm=False)
    for before, after in zip(clean, dirty, strict=True):
        for a, b in zip(before.outputs, after.outputs, strict=True):
            assert a.token_ids == b.token_ids
            torch.testing.assert_close(
                torch.tensor([entry.logprob for entry in a.logprobs]),
                torch.tensor([entry.logprob for entry in b.logprobs]),
            )
