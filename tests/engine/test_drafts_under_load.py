"""Loads that rise and fall, with all that drafts of the bundled model: every request is served."""

from importlib.util import find_spec

import pytest

from ridgeline import LLM, SamplingParams

pytestmark = pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="the native backend is not built")


def test_any_number_of_requests_behind_any_other():
    llm = LLM("python-9m", speculate="auto", num_threads=1, max_num_seqs=32)
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True)
    for count in (4, 1, 2, 1, 1, 5, 1, 3, 16, 1, 7, 1):
        prompts = [f"def add_{i}(a, b):\n    return a + {i}\n\n\ndef" for i in range(count)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [60] * count


@pytest.mark.parametrize("speculate", ["eagle", "suffix"])
def test_tokens_of_rounds_do_not_come_together_beyond_the_bound(speculate):
    prompt, most = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef", []
    for max_itl_s in (None, 1e-6):
        llm = LLM("python-9m", speculate=speculate, adaptive_speculation=False, num_threads=1, max_itl_s=max_itl_s)
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True), use_tqdm=False)
        most.append(max(llm.engine.loop.journal.steps.read()[1]["num_rounds"]))
    assert most[0] > most[1] == 1
