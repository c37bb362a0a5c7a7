"""What a step is predicted to take beside weights and cache is no less than what it allocates, and not far more."""

import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ridgeline._native", reason="the native module is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import native_steps
from native_steps import BF16, BLOCK_SIZE, CONTEXT, F32, native, schedule, settings_of, sizes_of, step
from tiny_models import build

from ridgeline import _native
from ridgeline.backends.base import StepLimits
from ridgeline.backends.native.measure import MeasuredTape
from ridgeline.backends.native.memory import logits_width
from ridgeline.backends.native.settings import MatrixFormat
from ridgeline.program.lower import lower
from ridgeline.spec import families

INT4 = MatrixFormat(kind="int4", inputs="int16", group=32)


# As real layers are wide, so that what is constant does not hide what grows with a step.
MOE = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v2", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 16, "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "first_k_dense_replace": 2,
}  # fmt: skip


def measure(program, weights, form, steps, *, threads=2, deterministic=False, context=CONTEXT):
    """Allocated by `steps`, and predicted for the largest of them: all but the logits, which are not the tape's."""
    dtype, kv = ("bfloat16", "bf16") if form is BF16 else ("float32", "f32")
    settings = {"num_threads": threads, "dtype": dtype, "matrices": form, "head": form, "kv": kv}
    settings["deterministic"] = deterministic
    level = _native.runnable_levels()[-1]
    executable = native(program, weights, level, **settings)
    assert executable.workspace_bytes == 0
    for spans in steps:
        executable.run(step(program, spans))
    num_tokens = max(sum(len(ids) for _, _, ids in spans) for spans in steps)
    limits = StepLimits(
        num_tokens=num_tokens,
        num_rows=num_tokens,  # all of them, as `step` asks
        num_seqs=max(len(spans) for spans in steps),
        context=context,
    )
    measured = MeasuredTape(program, settings_of(level, **settings), sizes_of(program), BLOCK_SIZE)
    logits_bytes = num_tokens * logits_width(program) * 4
    return executable.workspace_bytes, measured.workspace_bytes(limits) - logits_bytes


FORMS = [(F32, True), (BF16, False), (INT4, False)]


@pytest.mark.parametrize(("family", "form"), list(zip(families.names(), cycle(FORMS))), ids=families.names())
def test_no_step_takes_more_than_was_predicted(family, form, tmp_path):
    form, deterministic = form
    model = build(family, 1, tmp_path)
    program = model.lowered(CONTEXT)
    weights = {name: weight.bfloat16() for name, weight in model.weights.items()} if form is BF16 else model.weights
    ids = np.random.default_rng(5).integers(0, model.spec.vocab_size, (4, CONTEXT - 2))
    steps = [[(s, 0, ids[s].tolist()) for s in range(4)], *schedule(ids, np.random.default_rng(3))]
    allocated, predicted = measure(program, weights, form, steps, deterministic=deterministic)
    assert 0 < allocated <= predicted


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [MOE, MLA], ids=["experts", "latents"])
def test_the_prediction_is_near(config, deterministic):
    """For many tokens of many sequences, in chunks, so that latents are absorbed and expanded in the same steps."""
    program = lower(families.read_spec(config), CONTEXT)
    weights = {name: torch.zeros(shape) for name, shape in program.weights.items()}
    ids = [1] * 30
    steps = [
        [(s, 0, ids) for s in range(4)],
        [(s, 30, ids[:4]) for s in range(4)],
        [(0, 34, ids[:5]), (1, 34, ids[:1])],
    ]
    allocated, predicted = measure(program, weights, F32, steps, deterministic=deterministic)
    assert allocated <= predicted <= 2 * allocated


LONG = 2600
GQA = {
    "model_type": "mistral", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "max_position_embeddings": LONG, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "config",
    [GQA, GQA | {"sliding_window": 300}, MLA | {"max_position_embeddings": LONG, "num_hidden_layers": 1}],
    ids=["attention", "window", "latents"],
)
def test_contexts_that_are_cut_into_parts(config, deterministic, threads, monkeypatch):
    """Steps at random places of long sequences: decoding, chunks, drafts, and all of them at once."""
    monkeypatch.setattr(native_steps, "CONTEXT", LONG)
    monkeypatch.setattr(native_steps, "NUM_BLOCKS", LONG // BLOCK_SIZE)
    program = lower(families.read_spec(config), LONG)
    weights = {name: torch.zeros(shape) for name, shape in program.weights.items()}
    rng = np.random.default_rng(11)
    steps = []
    for _ in range(12):
        lengths = [int(rng.choice([1, 1, 3, 40])) for _ in range(int(rng.integers(1, 5)))]
        starts = [int(rng.choice([0, rng.integers(0, LONG - 40), LONG - 40])) for _ in lengths]
        steps.append([(s, start, [1] * length) for s, (start, length) in enumerate(zip(starts, lengths))])
    steps.append([(s, LONG - 40, [1] * 40) for s in range(4)])
    options = {"threads": threads, "deterministic": deterministic, "context": LONG}
    allocated, predicted = measure(program, weights, F32, steps, **options)
    assert 0 < allocated <= predicted <= 2.5 * allocated
