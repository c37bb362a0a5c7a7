"""Predictor layers that come with a checkpoint: they draft what a plain implementation drafts, where there are any."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import oracle_heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafts_in_the_engine import assert_same_outputs
from test_heads import FIXED, GREEDY, recorded
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from planting import World
from ridgeline import LLM, SamplingParams
from ridgeline.backends.select import offers
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.engine import companion
from ridgeline.engine.executor import InlineExecutor
from ridgeline.engine.model import open_model
from ridgeline.explain.rounds import break_even
from ridgeline.weights import heads

pytestmark = [
    pytest.mark.skipif(
        find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
    ),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
# Rotary scaling that looks at the length of a text is left out: transformers computes short texts in another way then.
MODELS = [
    ("deepseek_v3", 0), ("deepseek_v3", 6), ("deepseek_v3", 14), ("deepseek_v3", 16),
    ("qwen3_next", 1), ("qwen3_next", 8), ("qwen3_next", 19), ("qwen3_next", 43),
]  # fmt: skip
FAMILIES = [("deepseek_v3", 6), ("qwen3_next", 8)]
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
MTP = {"speculate": "mtp", **FIXED}


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared_data):
    return World(tmp_path_factory.mktemp("predictors"), shared_data)


def predictor_of(world, family, seed):
    """A predictor, and the folder of its model with it."""
    name = f"{family}-{seed}"

    def found():
        predictor = oracle_heads.Predictor(build(family, seed, world.folder / name))
        return predictor, predictor.write(world.folder / f"{name}-both")

    return world.once(name, found)


def wrong_drafts(predictor, folder, **options):
    """How many drafts of how many differ from those of the plain implementation, round after round."""
    llm = LLM(str(folder), **TINY | MTP | options)
    found = recorded(llm)
    llm.generate(prompts_of(predictor.model), GREEDY, use_tqdm=False)
    assert max(len(drafted) for _, drafted in found) == 3
    some = found[::3]
    return sum(drafted != predictor.greedy(token_ids, len(drafted)) for token_ids, drafted in some), len(some)


@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_it_drafts_what_a_plain_implementation_drafts(family, seed, world):
    """Round after round: true hidden states have replaced what was drafted and rejected."""
    wrong, drafted = wrong_drafts(*predictor_of(world, family, seed))
    assert wrong == 0
    assert drafted > 20


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}], ids=["", "chunked"])
@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_its_own_drafts_change_no_output(family, seed, options, world):
    """Alone, batched, in chunks, from cached prefixes, preempted; greedy and seeded, with several outputs."""
    predictor, folder = predictor_of(world, family, seed)
    llm, plain = LLM(str(folder), **TINY | MTP | options), LLM(str(folder), **TINY)
    assert_same_outputs(llm, plain, prompts_of(predictor.model))
    stats = llm.engine.loop.scheduler.strategy.drafts()["mtp"]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    cache = drafter_of(llm)._companion.cache
    check_cache(cache, {})
    assert all(group.used == 0 for group in cache.stats().groups)


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_it_is_part_of_the_memory_and_of_the_price_of_a_round(family, seed, world):
    predictor, folder = predictor_of(world, family, seed)
    config = EngineConfig.of(str(folder), speculate="mtp", dtype="float32")
    plan, _ = companion.plan_drafter(config, open_model(config), offers("auto"))
    own = [tensor for name, tensor in predictor.tensors().items() if not name.endswith(COPIES)]
    assert plan.needs.taken_bytes >= sum(4 * tensor.numel() for tensor in own)
    assert plan.needs.bytes_per_token > 0
    rounds = {}
    for speculate in ("ngram", "mtp"):
        found = break_even(EngineConfig.of(str(folder), speculate=speculate), "this", 12)[1]
        rounds[speculate] = {(r.drafts, r.batch): r.ratio for r in found if r.weights == "as stored"}
    one, two, four = (rounds["mtp"][drafts, 1] - rounds["ngram"][drafts, 1] for drafts in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one))
    assert two > one > 0


def before_the_final_norm(programs):
    fold, step = programs
    return fold, replace(step, taps=(next(op.inputs[0] for op in step.ops if op.outputs == step.taps),))


def other_side_first(programs):
    ops = [replace(op, inputs=op.inputs[::-1]) if op.kind == "concat" else op for op in programs[1].ops]
    return programs[0], replace(programs[1], ops=tuple(ops))


LOWERED = {"deepseek_v3": [other_side_first], "qwen3_next": [other_side_first, before_the_final_norm]}


@pytest.mark.parametrize(
    ("family", "seed", "planted"), [(*model, planted) for model in FAMILIES for planted in LOWERED[model[0]]]
)
def test_another_program_is_seen(family, seed, planted, world, monkeypatch):
    lower = heads.lower_predictor
    monkeypatch.setattr(heads, "lower_predictor", lambda *of: planted(lower(*of)))
    assert wrong_drafts(*predictor_of(world, family, seed))[0] > 0


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_hidden_states_without_the_models_final_norm_are_seen(family, seed, world, monkeypatch):
    monkeypatch.setattr(InlineExecutor, "chain", lambda *given, **more: None)  # step by step, folded by this:
    monkeypatch.setattr(companion, "_folded", lambda executor, hidden_TW: np.array(hidden_TW))
    assert wrong_drafts(*predictor_of(world, family, seed))[0] > 0


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_on_the_reference_backend(family, seed, world):
    assert wrong_drafts(*predictor_of(world, family, seed), backend="reference", deterministic=False)[0] == 0


def test_of_several_predictors_the_first_is_used(world, tmp_path):
    predictor, _ = predictor_of(world, "deepseek_v3", 16)
    first, second = predictor.at, f"model.layers.{len(predictor.model.spec.layers) + 1}."
    more = {name.replace(first, second): tensor + 1 for name, tensor in predictor.tensors().items()}
    folder = predictor.write(tmp_path, {"num_nextn_predict_layers": 2}, more)
    assert wrong_drafts(predictor, folder)[0] == 0
    assert LLM(str(folder), **TINY).generate([[1, 2, 3]], GREEDY, use_tqdm=False)


def test_sampled_drafts_are_of_the_distribution_that_is_told_of_them(world):
    predictor, folder = predictor_of(world, "qwen3_next", 8)
    llm = LLM(str(folder), **{**TINY, "deterministic": False}, **MTP, draft_sample_method="probabilistic")
    draft, told = drafter_of(llm).draft, []

    def telling(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        told.extend(pair for one in drafts.values() for pair in zip(one.token_ids, one.weights, strict=True))
        return drafts

    drafter_of(llm).draft = telling
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    llm.generate(prompts_of(predictor.model), params, use_tqdm=False)
    assert len(told) > 60
    assert all(weights_V[token_id] > 0 for token_id, weights_V in told)
    stats = llm.engine.loop.scheduler.strategy.drafts()["mtp"]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_weights_in_fp8_as_they_are_published(world, tmp_path):
    """Blocks with scales, in the predictor as well: the same drafts as of what these multiply out to."""
    predictor, _ = predictor_of(world, "deepseek_v3", 16)
    stored, plain = load_file(predictor.write(tmp_path / "fp8") / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        if name.endswith(("_proj.weight", "_with_mqa.weight")) and "eh_proj" not in name:
            blocks = [-(-size // 8) for size in tensor.shape]
            scales = torch.rand(blocks, generator=torch.Generator().manual_seed(len(plain))) / 50 + 0.01
            every = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)[: tensor.shape[0], : tensor.shape[1]]
            stored[name] = (tensor / every).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"], plain[name] = scales, stored[name].float() * every
    assert any(name.startswith(predictor.at) for name in plain)
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    (tmp_path / "fp8/config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    save_file(stored, tmp_path / "fp8/model.safetensors")
    predictor.write(tmp_path / "plain", tensors=plain)
    drafts = []
    for name in ("fp8", "plain"):
        llm = LLM(str(tmp_path / name), **TINY | MTP)
        drafts.append(recorded(llm))
        llm.generate(prompts_of(predictor.model), GREEDY, use_tqdm=False)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 60


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_a_checkpoint_without_its_predictor_loads_where_nobody_asks_for_it(family, seed, world, tmp_path):
    predictor, folder = predictor_of(world, family, seed)
    bare = predictor.write(tmp_path / "bare", tensors=dict.fromkeys(predictor.tensors()))
    params, prompts = SamplingParams(temperature=0, max_tokens=9), prompts_of(predictor.model)
    one, other = (LLM(str(path), **TINY).generate(prompts, params, use_tqdm=False) for path in (bare, folder))
    assert [o.outputs[0].token_ids for o in one] == [o.outputs[0].token_ids for o in other]
    refused(bare, ModelLoadError, "cannot draft with its predictor layer; leave speculate=mtp out.* missing: ")


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"self_attn.o_proj.weight": None}, "1 missing: .*self_attn.o_proj.weight"),
        ({"self_attn.o_proj.weight": torch.ones(3, 3)}, r"1 of another shape: .*o_proj.weight \[3, 3\] instead of"),
        ({"other.weight": torch.ones(3)}, "1 unexpected: .*other.weight"),
        ({"input_layernorm.weight": torch.ones(3, dtype=torch.int32)}, "input_layernorm.weight I32"),
    ],
    ids=["missing", "shape", "unexpected", "type"],
)
def test_a_broken_predictor_is_refused_in_one_line(family, seed, tensors, words, world, tmp_path):
    predictor, _ = predictor_of(world, family, seed)
    changed = {predictor.at + name: tensor for name, tensor in tensors.items()}
    refused(predictor.write(tmp_path, tensors=changed), ModelLoadError, words)


def refused(path, error, words):
    with pytest.raises(error, match=words) as caught:
        LLM(str(path), **TINY | MTP)
    assert "\n" not in str(caught.value)


def test_models_without_one_are_refused_in_one_line(world, tmp_path):
    llama = build("llama", 3, tmp_path / "llama")
    refused(llama.folder.path, ConfigError, "llama has no predictor layer: .* a llama; leave speculate=mtp out")
    predictor, _ = predictor_of(world, "deepseek_v3", 16)
    none = predictor.write(tmp_path / "none", {"num_nextn_predict_layers": 0})
    refused(none, ConfigError, "none has no predictor layer")
    recurrent = oracle_heads.Predictor(build("qwen3_next", 2, tmp_path / "recurrent"))
    refused(recurrent.write(tmp_path / "r"), ConfigError, "r cannot verify drafts of mtp: .* all recurrent")


def test_gguf_files_are_refused_in_one_line(shared_data):
    path = shared_data / "models/stories260K/stories260K.gguf"
    refused(path, ConfigError, "predictor layers are not read from GGUF; leave speculate=mtp out")
