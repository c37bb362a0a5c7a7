"""Predictor layers that come with a checkpoint: they guess what a plain implementation guesses, and change no output."""

from importlib.util import find_spec

import oracle_heads
import pytest
from test_heads import recorded
from tiny_models import build

from drafting import TINY, prompts_of
from ridgeline import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
MODELS = [("deepseek_v3", 3), ("deepseek_v3", 1), ("qwen3_next", 1), ("qwen3_next", 2)]


@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_it_drafts_what_a_plain_implementation_drafts(family, seed, tmp_path):
    """Round after round: true hidden states have replaced what was drafted and rejected."""
    model = build(family, seed, tmp_path / "model")
    predictor = oracle_heads.Predictor(model)
    llm = LLM(str(predictor.write(tmp_path / "both")), **TINY, speculate="mtp", **FIXED)
    found = recorded(llm)
    llm.generate(prompts_of(model), GREEDY, use_tqdm=False)
    assert max(len(drafted) for _, drafted in found) == 3
    wrong = [ids for ids, drafted in found[::3] if drafted != predictor.greedy(ids, len(drafted))]
    assert not wrong
    assert len(found) > 20
