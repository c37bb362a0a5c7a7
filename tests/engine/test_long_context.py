"""Sliding, hybrid and sharing models at 32k tokens of context: what they hold is what the cost model predicts, and the
next turn of a conversation finds it, or says why not."""

import json

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.cache.groups import full, sliding
from ridgeline.cache.manager import WHOLE_BLOCKS
from ridgeline.core.dtypes import DTYPES
from ridgeline.cost import account as cost
from ridgeline.program.lower import lower
from ridgeline.spec import families
from ridgeline.weights.save import save_weights

pytest.importorskip("ridgeline._native", reason="the native module is not built")

CONTEXT = 32768
WINDOW = 1024
SPAN = 512
BLOCK = 16
OUTPUT = 32
FLOAT32 = 4
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}
MODELS = {
    "all layers slide": SMALL | {"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": WINDOW},
    "every sixth layer is full": SMALL
    | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": WINDOW, "sliding_window_pattern": 6},
    "two layers share keys and values": SMALL
    | {"model_type": "hunyuan", "num_hidden_layers": 2, "use_cla": True, "cla_share_factor": 2, "use_qk_norm": True},
}


def open_model(config, folder):
    """The model with random weights, room in the cache for a little more than one sequence."""
    config = dict(config)
    if config["model_type"] == "hunyuan":
        config["attention_head_dim"] = config.pop("head_dim")
    spec = families.read_spec(config)
    program = lower(spec)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in program.weights.items()
    }
    save_weights(folder, spec, as_arrays(weights), DTYPES["float32"])
    (folder / "config.json").write_text(json.dumps(config))
    held = cost.kv_bytes(program, CONTEXT, FLOAT32) + SPAN * cost.kv_bytes_per_token(program, FLOAT32)
    llm = LLM(
        str(folder),
        backend="native",
        dtype="float32",
        block_size=BLOCK,
        max_num_seqs=1,
        max_num_batched_tokens=SPAN,
        kv_cache_bytes=held + held // 8,
        num_threads=1,
    )
    return llm, program


def record(llm, monkeypatch):
    """A list that gets, for each step, the tokens of its sequence once computed, those of its span, and the bytes in
    use while it runs."""
    scheduler, seen = llm.engine.loop.scheduler, []
    plan = scheduler.plan

    def recorded():
        made = plan()
        for span in made.spans:
            groups = scheduler.stats().cache.groups
            used = sum(llm.engine.layout.block_bytes(i) * group.used for i, group in enumerate(groups))
            seen.append((span.end, span.num_tokens, used))
        return made

    monkeypatch.setattr(scheduler, "plan", recorded)
    return seen


def slack_bytes(program, span):
    """What may be held beyond the prediction: a block at both ends of what is cached, and a window's span in flight."""
    return sum(
        (2 * BLOCK + (span if group.window else 0)) * group.bytes_per_token
        for group in cost.kv_groups(program, FLOAT32)
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_holds_and_finds_what_it_should(name, tmp_path, monkeypatch):
    llm, program = open_model(MODELS[name], tmp_path)
    steps = record(llm, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(64, (CONTEXT - 4 * OUTPUT,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)

    (first,) = llm.generate([prompt], params, use_tqdm=False)
    assert first.num_cached_tokens == 0
    assert first.uncached_reason == full.FullGroup.miss_reason
    assert steps[-1][0] == len(prompt) + OUTPUT - 1
    for end, span, used in steps:
        predicted = cost.kv_bytes(program, end, FLOAT32)
        assert predicted <= used <= predicted + slack_bytes(program, span)
        if span == 1:
            assert used <= 1.05 * predicted

    turn = prompt + first.outputs[0].token_ids + [1, 2, 3]
    (second,) = llm.generate([turn], params, use_tqdm=False)
    computed = len(prompt) + OUTPUT - 1  # the last token of an output is never computed
    assert second.num_cached_tokens == computed // BLOCK * BLOCK
    assert second.uncached_reason in (WHOLE_BLOCKS, full.FullGroup.miss_reason)

    (branch,) = llm.generate([[*prompt[: CONTEXT // 2], 1, 2, 3]], params, use_tqdm=False)
    slides = any(group.window for group in cost.kv_groups(program, FLOAT32))
    assert branch.num_cached_tokens == (0 if slides else CONTEXT // 2)
    assert branch.uncached_reason == (sliding.SlidingGroup.miss_reason if slides else WHOLE_BLOCKS)


def test_sharing_halves_what_two_layers_keep():
    config = MODELS["two layers share keys and values"] | {"attention_head_dim": 16}
    del config["head_dim"]
    shared, apart = (lower(families.read_spec(config | {"use_cla": use})) for use in (True, False))
    assert 2 * cost.kv_bytes(shared, CONTEXT, FLOAT32) == cost.kv_bytes(apart, CONTEXT, FLOAT32)
    assert cost.shared_kv(shared, FLOAT32) == cost.SharedKv(1, cost.kv_bytes_per_token(shared, FLOAT32))
    assert cost.shared_kv(apart, FLOAT32) == cost.SharedKv(0, 0)
