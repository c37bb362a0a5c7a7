"""Every drafter, by its file: it changes no output, drafts, says how far it lags, and keeps nothing of what ended."""

from importlib.util import find_spec

import oracle_heads
import pytest
from test_drafts_in_the_engine import assert_same_outputs
from test_parallel import MASK, with_mask
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.core.speculation import drafter_names

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)


def model_and_drafter(name, folder):
    """(a tiny model, the folder of it, and what `--speculate` is told); a new drafter needs a line here."""
    model = build("qwen3_next" if name == "mtp" else "llama", 3 if name != "mtp" else 8, folder / "model")
    own = str(model.folder.path)
    if name == "mtp":
        return model, str(oracle_heads.Predictor(model).write(folder / "mtp")), name
    asked = {
        "draft": lambda: own,
        "early-exit": lambda: 1,
        "eagle": lambda: oracle_heads.Eagle(model, 1, ()).write(folder / "head"),
        "medusa": lambda: oracle_heads.Medusa(model, "paper", 3).write(folder / "heads"),
        "parallel": lambda: with_mask(model, folder / "parallel", pard_token=MASK),
    }
    return model, own, f"{name}:{asked[name]()}"


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("name", drafter_names())
def test_a_drafter_changes_no_output(name, adaptive, tmp_path):
    model, folder, speculate = model_and_drafter(name, tmp_path)
    options = {"speculate": speculate, "adaptive_speculation": adaptive, "num_speculative_tokens": 3}
    llm = LLM(folder, **TINY, **options)
    assert_same_outputs(llm, LLM(folder, **TINY), prompts_of(model))
    stats, drafter = llm.engine.loop.scheduler.strategy.drafts()[name], drafter_of(llm)
    assert stats.num_accepted_tokens == sum(stats.num_accepted_per_position) <= stats.num_draft_tokens
    assert adaptive or stats.num_draft_tokens > 0
    check_cache(drafter._companion.cache, {})
    assert all(group.used == 0 for group in drafter._companion.cache.stats().groups)


def generate_around_drafts(name, tmp_path, before, after):
    """Complete a prompt, and call `before` and `after` with the drafter and each sequence that it drafts for."""
    model, folder, speculate = model_and_drafter(name, tmp_path)
    options = {"speculate": speculate, "adaptive_speculation": False, "num_speculative_tokens": 3}
    llm = LLM(folder, **TINY, **options)
    drafter = drafter_of(llm)
    draft = drafter.draft

    def drafting(asked, max_catch_up):
        for view, *_ in asked:
            before(drafter, view)
        drafts = draft(asked, max_catch_up)
        for view, *_ in asked:
            after(drafter, view)
        return drafts

    drafter.draft = drafting
    llm.generate(prompts_of(model, 1), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)


@pytest.mark.parametrize("name", drafter_names())
def test_a_drafter_lags_by_what_it_has_not_computed(name, tmp_path):
    """Before its first draft by a prompt at most, then by no more than what a round gained."""
    lags = []

    def before(drafter, view):
        lags.append((drafter.lag(view), len(view.token_ids)))

    generate_around_drafts(name, tmp_path, before, lambda *_: None)
    assert all(0 <= lag < known for lag, known in lags)
    assert max(lag for lag, _ in lags[1:]) <= 3


class Watched(list):
    """Tokens that tell how long a part of them was ever copied."""

    longest = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.longest = max(self.longest, len(found) if isinstance(index, slice) else 1)
        return found


@pytest.mark.parametrize("name", drafter_names())
def test_a_round_copies_no_more_of_a_text_than_it_gained(name, one_round, tmp_path):
    """A copy of the text touches each of its tokens, round after round."""
    copied = []

    def before(drafter, view):
        view.token_ids = Watched(view.token_ids)
        drafter.lag(view)

    generate_around_drafts(name, tmp_path, before, lambda _, view: copied.append(view.token_ids.longest))
    assert len(copied) > 4
    assert max(copied[1:]) <= 5
