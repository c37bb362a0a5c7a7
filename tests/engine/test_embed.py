"""LLM.embed: vectors equal transformers' hidden states, pooled, whatever else is in the batch."""

import asyncio
import contextlib
import json

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, Qwen3Config, Qwen3Model

from cache_invariants import check_cache
from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    ModelLoadError,
    OverloadedError,
    RequestError,
)
from ridgeline.core.params import PoolingParams
from ridgeline.engine.client import embed
from ridgeline.engine.thread_engine import ThreadEngine

VOCAB = 97
PROMPTS = [[3, 14, 15, 92, 6], [5], [35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79], [2, 71, 82, 81, 82, 84, 59, 4]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder and an encoder of random weights, as published: no prefix, no head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 64}
    models = {
        "qwen3": Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=12, tie_word_embeddings=True)),
        "bert": BertModel(BertConfig(**sizes)),
    }
    found = {}
    for name, model in models.items():
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def llm_of(folder, backend="reference", **options):
    defaults = {"dtype": "float32", "num_threads": 1, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12}
    return LLM(str(folder), backend=backend, **(defaults | options))


def hidden_states(folder, prompt):
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


POOLED = {"last": lambda rows: rows[-1], "first": lambda rows: rows[0], "mean": lambda rows: rows.mean(0)}


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_vectors_are_those_of_transformers(folders, name, pooling, backend):
    llm = llm_of(folders[name], backend, task="embed")
    outputs = llm.embed(PROMPTS, pooling=pooling, normalize=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = POOLED[pooling](hidden_states(folders[name], prompt))
        assert output.prompt_token_ids == prompt
        np.testing.assert_allclose(output.embedding, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "pooling"), [("qwen3", "last"), ("bert", "mean")])
def test_by_default_a_decoder_takes_the_last_token_and_an_encoder_the_mean_at_length_one(folders, name, pooling):
    llm = llm_of(folders[name], task="embed")
    (output,) = llm.embed(PROMPTS[2])
    expected = POOLED[pooling](hidden_states(folders[name], PROMPTS[2]))
    np.testing.assert_allclose(output.embedding, expected / np.linalg.norm(expected), atol=1e-5)


def test_the_folder_says_how_to_pool(folders, tmp_path):
    for file in folders["bert"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"word_embedding_dimension": 36, "pooling_mode_cls_token": True}))
    (first,) = llm_of(tmp_path).embed(PROMPTS[3], normalize=False)
    np.testing.assert_allclose(first.embedding, hidden_states(folders["bert"], PROMPTS[3])[0], atol=1e-4)
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ModelLoadError, match="pooling_mode_max_tokens"):
        llm_of(tmp_path)


@pytest.mark.parametrize(("name", "inputs"), [("qwen3", "int8"), ("bert", "int16")])
def test_an_encoder_keeps_16_bits_of_its_inputs(folders, backend, name, inputs):
    choices = llm_of(folders[name], backend, quantize="int8").engine.info.choices
    assert choices["quantize_inputs"].value == inputs


def test_a_long_text_is_cut_for_a_decoder_and_refused_by_an_encoder(folders):
    text = list(range(40))
    (output,) = llm_of(folders["qwen3"], task="embed").embed(text, normalize=False)
    np.testing.assert_allclose(output.embedding, hidden_states(folders["qwen3"], text)[-1], atol=1e-4)
    with pytest.raises(ContextLengthError, match="max_num_batched_tokens"):
        llm_of(folders["bert"]).embed(text)
    with pytest.raises(ContextLengthError, match="maximum context length is 64"):
        llm_of(folders["bert"]).embed([1] * 65)


def test_what_embeds_does_not_generate_and_the_other_way_round(folders):
    with pytest.raises(RequestError, match="loaded to embed"):
        llm_of(folders["bert"]).generate([[1]], SamplingParams())
    with pytest.raises(RequestError, match="loaded to generate"):
        llm_of(folders["qwen3"]).embed([[1]])
    with pytest.raises(ConfigError, match="encoder"):
        llm_of(folders["bert"], task="generate")


def test_many_texts_in_a_small_cache(folders, backend):
    """More texts than the cache holds at once: each waits for its turn, and its vector does not depend on it."""
    llm = llm_of(folders["bert"], backend, max_model_len=16, kv_cache_bytes=1 << 15)
    vectors = [output.embedding for output in llm.embed(PROMPTS * 8)]
    for i, vector in enumerate(vectors):
        np.testing.assert_allclose(vector, vectors[i % len(PROMPTS)], atol=1e-6)
    assert all(stats.used == 0 for stats in llm.engine.loop.stats().cache.groups)
    check_cache(llm.engine.loop.scheduler.cache, {})


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_a_text_that_lost_its_blocks_is_computed_again(folders, name, pooling):
    llm = llm_of(folders[name], task="embed", max_num_seqs=2)
    scheduler = llm.engine.loop.scheduler
    plan, steps = scheduler.plan, []

    def preempting_plan():
        steps.append(len(scheduler.running()))
        if len(steps) in (2, 3) and scheduler.running():
            scheduler.preempt(scheduler.running()[-1])
        return plan()

    scheduler.plan = preempting_plan
    text = [*range(30)] if name == "qwen3" else PROMPTS[2]
    outputs = llm.embed([text, PROMPTS[0]], pooling=pooling, normalize=False)
    for prompt, output in zip([text, PROMPTS[0]], outputs, strict=True):
        expected = POOLED[pooling](hidden_states(folders[name], prompt))
        np.testing.assert_allclose(output.embedding, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_an_event_loop_gets_vectors_with_deadlines_and_aborts(folders):
    config = EngineConfig.of(str(folders["qwen3"]), dtype="float32", num_threads=1, task="embed", block_size=4)

    async def scenario():
        engine = ThreadEngine(config)
        engine.start()
        try:
            intake, how = engine.engine.intake, PoolingParams(pooling=engine.info().pooling, normalize=False)
            vectors = await embed(engine, *(intake.embedding(prompt, how) for prompt in PROMPTS))
            for prompt, vector in zip(PROMPTS, vectors, strict=True):
                expected = hidden_states(folders["qwen3"], prompt)[-1]
                np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
            with pytest.raises((EngineError, OverloadedError), match="deadline"):  # of a step, or of the reader
                await embed(engine, intake.embedding(PROMPTS[0], how, deadline_s=-1.0))
            with contextlib.suppress(asyncio.TimeoutError):
                leaving = embed(engine, *(intake.embedding([7] * 60, how) for _ in range(20)))
                await asyncio.wait_for(leaving, timeout=0.001)
            for _ in range(1000):
                if not (engine.engine.loop.scheduler.running() or engine.engine.loop.scheduler.stats().num_waiting):
                    break
                await asyncio.sleep(0.005)
            assert engine.num_unfinished == 0
            assert all(group.used == 0 for group in engine.engine.loop.stats().cache.groups)
        finally:
            engine.stop()

    asyncio.run(scenario())


def test_texts_share_steps_and_a_broken_one_harms_no_other(folders, monkeypatch):
    llm = llm_of(folders["bert"], max_num_batched_tokens=40)
    expected = [output.embedding for output in llm.embed(PROMPTS)]
    assert llm.engine.loop.scheduler.stats().num_steps == 1  # 25 tokens
    strategy = llm.engine.loop.scheduler.strategy
    pool = strategy.pool

    def broken(view, span, rows_RH):
        if view.request.prompt_ids == tuple(PROMPTS[1]):
            raise RuntimeError("a defect")
        return pool(view, span, rows_RH)

    monkeypatch.setattr(strategy, "pool", broken)
    with pytest.raises(EngineError, match="RuntimeError"):
        llm.embed(PROMPTS)
    monkeypatch.undo()
    for output, before in zip(llm.embed(PROMPTS), expected, strict=True):
        np.testing.assert_array_equal(output.embedding, before)
    check_cache(llm.engine.loop.scheduler.cache, {})
