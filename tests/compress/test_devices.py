"""Training stays on the device that it was asked for: no tensor is left behind on another one.

The device is torch's `meta`, which every machine has: it computes shapes alone, and refuses what lies elsewhere.
"""

import contextlib

import numpy as np
import pytest
import torch

from ridgeline.backends.reference import tensors
from ridgeline.backends.reference.dense import DenseModel
from ridgeline.cli._measured import training_on
from ridgeline.compress import distill, heads, train
from ridgeline.compress.calibrate import Loaded
from ridgeline.compress.recipe import DistillRecipe
from ridgeline.core.errors import ConfigError

META = torch.device("meta")


@pytest.fixture
def model(monkeypatch):
    for module in (tensors, distill, heads, train):  # torch has no autocast for this device
        monkeypatch.setattr(module, "autocast", lambda dtype: contextlib.nullcontext())
    with training_on("meta"):
        yield Loaded.open("python-1m")


def learn(model, weights, loss_of, batch_BT):
    """One step forth and back."""
    drafting = DenseModel(model, weights)
    loss = loss_of(drafting, batch_BT, np.random.default_rng(0))
    loss.backward()
    assert loss.device == META
    assert {weight.grad.device for weight in drafting.parameters() if weight.grad is not None} == {META}


@pytest.mark.parametrize("kind", heads.HEADS)
def test_a_head_is_trained_where_it_was_asked_for(model, kind):
    head = heads.HEADS[kind](model, np.arange(64), 3)
    weights = heads._begun(head, model, 0)
    batch_BT = train._batch(
        np.arange(999) % 64, 0, train.Recipe(num_tokens=64, batch_tokens=32), np.random.default_rng(0)
    )
    assert {weight.device for weight in (*weights.values(), *model.weights.values(), batch_BT)} == {META}
    learn(head.program, weights, head, batch_BT[:, :33])
    with torch.inference_mode():
        logits_BTV, drafted = head.both(DenseModel(head.program, weights), batch_BT[:, :33])
    assert (head.ids_K[drafted.argmax(-1)] == head._ahead(logits_BTV.argmax(-1))).device == META


@pytest.mark.parametrize("hidden", [False, True])
def test_a_student_is_trained_where_it_was_asked_for(model, hidden):
    loss_of = distill.Distillation(model.program, model, DistillRecipe(hidden_loss=hidden), torch.float32)
    learn(model.program, dict(model.weights), loss_of, torch.zeros(2, 17, dtype=torch.int64))
    text = train.TextLoss(model.spec, torch.float32)
    learn(model.program, train.initial_weights(model.program.weights, 0), text, torch.zeros(2, 17, dtype=torch.int64))


def test_a_device_that_is_not_there_is_refused():
    with (
        pytest.raises(ConfigError, match="--device cuda:99 is not one that torch computes on here"),
        training_on("cuda:99"),
    ):
        pass
    assert torch.get_default_device() == torch.device("cpu")
