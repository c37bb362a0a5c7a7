"""tools/compare_ops.py agrees with transformers on a right model and names the wrong ops of a broken one."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.program.ops.attention import RopeAttrs
from ridgeline.spec.families import read_spec
from ridgeline.weights.load import load_weights

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "compare_ops.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama in transformers, its program, its weights and token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    module = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    module.save_pretrained(folder)
    spec = read_spec(config.to_dict())
    program = lower(spec)
    weights = as_tensors(load_weights(folder, spec, program, FLOAT32))
    return module, program, weights, torch.randint(64, (9,))


def wrong(module, program: Program, weights, token_ids_T) -> list[str]:
    compared = TOOL["compare"](program, weights, module, token_ids_T)
    assert len(compared) == sum(bool(op.outputs) for op in program.ops)
    return [item.op.label for item in compared if not item.is_right]


def test_a_right_model_agrees(model):
    module, program, weights, token_ids_T = model
    assert wrong(module, program, weights, token_ids_T) == []


def test_a_wrong_weight_is_the_first_wrong_op(model):
    module, program, weights, token_ids_T = model
    name = "layers.1.ffn.up.weight"
    broken = {**weights, name: weights[name] * 1.1}
    assert wrong(module, program, broken, token_ids_T)[0] == "layers.1.ffn.up"


def test_an_op_that_transformers_has_no_module_for_is_found_too(model):
    module, program, weights, token_ids_T = model
    ops = tuple(
        replace(op, attrs=replace(op.attrs, interleaved=True))
        if isinstance(op.attrs, RopeAttrs) and op.label.startswith("layers.0.attn.q")
        else op
        for op in program.ops
    )
    suspects = wrong(module, replace(program, ops=ops), weights, token_ids_T)
    assert suspects[:2] == ["rope.0", "layers.0.attn.q.rope"]  # the angles are confirmed by nothing else either


def test_the_bundled_model_agrees(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_ops", "python-1m"])
    assert TOOL["main"]() == 0
    assert "ops agree with transformers" in capsys.readouterr().out
