"""Training of heads: a drafted token sees what it sees when it is served, heads learn, and what is written loads."""

import numpy as np
import pytest
import torch
from tests.compress.test_distilling import TEACHER, TEXTS, open_model

from ridgeline import LLM, SamplingParams
from ridgeline.backends.reference.dense import DenseMemory, DenseModel, dense_inputs, dense_values
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.compress.distill import token_stream
from ridgeline.compress.heads import HEADS, Eagle, aux_layers, train_head
from ridgeline.compress.recipe import HeadRecipe
from ridgeline.compress.train import initial_weights
from ridgeline.core.errors import ConfigError
from ridgeline.program.op import FEATURES
from ridgeline.quality.texts import Texts
from ridgeline.weights.heads import open_eagle
from ridgeline.weights.medusa import open_medusa

OPENED = {"eagle3": open_eagle, "medusa": open_medusa}
RECIPE = HeadRecipe(tokens=30 * 128, batch_tokens=128, window_tokens=32, rate=0.02, draft_vocab_size=96)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(tmp_path_factory.mktemp("heads") / "model", TEACHER, 1, loud=8.0)


def test_every_drafted_token_sees_the_text_and_the_drafts_before_it(model):
    head = Eagle(model, np.arange(64), 3)
    weights = initial_weights(head.program.weights, 0)
    weights = model.weights | {name: torch.randn_like(weight) * 0.2 for name, weight in weights.items()}
    ids_BT = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    values = dense_values(head._tapped, model.weights, ids_BT)
    hidden_BTW = torch.cat([values[name] for name in head._tapped.taps], -1).unflatten(0, (2, 12))
    found = head.drafted(weights, ids_BT, hidden_BTW, 9)
    assert found.shape == (2, 9, 3, 64)

    for row, place in [(0, 0), (0, 8), (1, 4)]:  # as it is served: the text's states, then its own outputs
        fold = interpret(head._fold, weights, {FEATURES: hidden_BTW[row, : place + 1]}, DenseMemory((), 1, place + 1))
        features = fold[head._fold.result]
        for ahead in range(3):
            tokens = ids_BT[row : row + 1, 1 : place + 2 + ahead]
            inputs = dense_inputs(tokens) | {FEATURES: features}
            step = interpret(head.program, weights, inputs, DenseMemory(head.program.states, 1, tokens.shape[1]))
            torch.testing.assert_close(found[row, place, ahead], step[head.program.result][-1], rtol=1e-4, atol=1e-4)
            features = torch.cat([features, step[head.program.taps[0]][-1:]])


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_learns_and_drafts_for_its_model(model, kind, tmp_path):
    seen, tokens = [], token_stream(TEXTS, model.folder)
    out = train_head(kind, model, RECIPE, (tokens, tokens), tmp_path / kind, seen.append)
    assert out == tmp_path / f"{kind}.partial"
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert seen[-1].held_out > 0.5  # of three
    source = OPENED[kind](str(out), model.spec, "model")
    assert source.token_ids_V is not None and len(source.token_ids_V) == 96

    params, prompt = SamplingParams(temperature=0, max_tokens=16), TEXTS.by_name["3.py"][:40]
    options = {"deterministic": True, "adaptive_speculation": False}
    name = str(model.folder.path)
    plain = LLM(name, deterministic=True).generate([prompt], params, use_tqdm=False)[0]
    llm = LLM(name, speculate=f"{kind.removesuffix('3')}:{out}", **options)
    drafted = llm.generate([prompt], params, use_tqdm=False)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_the_likeliest_token_counts_if_it_is_not_among_those_that_a_head_drafts(model):
    """A head that drafts the best of its own tokens is right only where the model's best is among them."""
    windows_BT = torch.tensor(model.folder.tokenizer().encode(TEXTS.by_name["5.py"])[:32])[None]
    head = HEADS["medusa"](model, np.arange(4090, 4096), 2)
    with torch.inference_mode():
        logits_BTV, _ = head.both(DenseModel(head.program, initial_weights(head.program.weights, 0)), windows_BT)
    best = logits_BTV.argmax(-1)[:, 1:]
    assert not np.isin(best, np.arange(4090, 4096)).any()
    assert head.num_accepted(DenseModel(head.program, initial_weights(head.program.weights, 0)), windows_BT) == 0.0


@pytest.mark.parametrize("num_layers", range(1, 65))
def test_a_head_reads_three_layers_wherever_there_are_three(num_layers):
    layers = aux_layers(num_layers)
    assert layers == tuple(sorted(layers))
    assert set(layers) <= set(range(num_layers))
    assert len(set(layers)) == min(num_layers, 3)
    if len(published := {2, num_layers // 2, num_layers - 3}) == 3 and num_layers >= 7:
        assert layers == tuple(sorted(published))


def test_the_layers_of_a_model_as_small_as_the_bundled_one():
    assert aux_layers(5) == (1, 2, 4)


def test_too_little_text_and_a_folder_in_use_are_refused(model, tmp_path):
    tokens, short = (token_stream(each, model.folder) for each in (TEXTS, Texts("here", {"a": "x = 1"})))
    with pytest.raises(ConfigError, match="held-out text has"):
        train_head("medusa", model, RECIPE, (tokens, short), tmp_path / "a", print)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(ConfigError, match="exists already"):
        train_head("medusa", model, RECIPE, (tokens, tokens), tmp_path / "b", print)
