"""Distillation: the loss is the KL that it says, a student comes nearer to its teacher, and wrong pairs are refused."""

import json
import shutil

import numpy as np
import pytest
import torch

from ridgeline.backends.reference.dense import DenseModel, dense_logits
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.compress.calibrate import Loaded
from ridgeline.compress.distill import Distillation, distill
from ridgeline.compress.recipe import DistillRecipe
from ridgeline.compress.train import initial_weights
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quality.texts import Texts
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.save import save_weights

TEXTS = Texts("here", {f"{i}.py": f"def f{i}(x):\n    return [x * {i} for _ in range({i})]\n" * 9 for i in range(12)})
RECIPE = DistillRecipe(tokens=24 * 128, batch_tokens=128, rate=0.01)
TEACHER = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32", "hidden_act": "silu", "tie_word_embeddings": True, "head_dim": 16,
}  # fmt: skip
STUDENT = TEACHER | {"hidden_size": 32, "num_hidden_layers": 2}
IDS = torch.tensor(ModelFolder.open("python-1m").tokenizer().encode(TEXTS.by_name["3.py"])[:66]).reshape(2, 33)


def open_model(path, config, seed=0, *, loud=1.0):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for file in ModelFolder.open("python-1m").path.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    weights = initial_weights(lower(read_spec(config)).weights, seed)
    weights["embed.weight"] *= loud
    save_weights(path, read_spec(config), as_arrays(weights), FLOAT32)
    return Loaded.open(path)


@pytest.fixture
def pair(tmp_path):
    """A student, and a teacher whose predictions differ from token to token."""
    return open_model(tmp_path / "student", STUDENT), open_model(tmp_path / "teacher", TEACHER, 1, loud=8.0)


def kl_to(teacher, student):
    with torch.inference_mode():
        log_p, log_q = (
            dense_logits(each.program, each.weights, IDS).double().log_softmax(-1) for each in (teacher, student)
        )
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_kl_of_tokens_at_a_temperature(pair, temperature):
    student, teacher = pair
    loss = Distillation(student.program, teacher, DistillRecipe(temperature=temperature), torch.float32)
    found = loss(DenseModel(student.program, student.weights), IDS, np.random.default_rng(0))
    with torch.inference_mode():
        p, q = (
            (dense_logits(each.program, each.weights, IDS[:, :-1]) / temperature).double().softmax(-1)
            for each in (teacher, student)
        )
    wanted = temperature**2 * (p * (p.log() - q.log())).sum(-1).mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert not list(loss.parameters())


def test_hidden_states_weigh_as_much_as_predictions_and_teach_their_projections(pair):
    student, teacher = pair
    plain, both = (
        Distillation(student.program, teacher, DistillRecipe(hidden_loss=hidden), torch.float32)
        for hidden in (False, True)
    )
    model, rng = DenseModel(student.program, student.weights), np.random.default_rng(0)
    assert [tuple(each.shape) for each in both.projections] == [(64, 32)] * 2
    loss = both(model, IDS, rng)
    assert loss.item() == pytest.approx(2 * plain(model, IDS, rng).item(), rel=1e-4)
    loss.backward()
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in both.projections)
    assert all(weight.grad is None for weight in teacher.weights.values())


def test_a_copy_of_the_teacher_has_nothing_to_learn(pair):
    _, teacher = pair
    loss = Distillation(teacher.program, teacher, DistillRecipe(hidden_loss=True), torch.float32)
    found = loss(DenseModel(teacher.program, teacher.weights), IDS, np.random.default_rng(0))
    assert found.item() == pytest.approx(0, abs=1e-5)
    assert not list(loss.parameters())  # widths are equal


@pytest.mark.parametrize("hidden", [False, True])
def test_a_student_comes_nearer_and_the_same_seed_gives_the_same_student(pair, tmp_path, hidden):
    student, teacher = pair
    recipe = DistillRecipe(tokens=24 * 128, batch_tokens=128, rate=0.01, hidden_loss=hidden)
    before = kl_to(teacher, student)
    folders = [
        distill(student, teacher, recipe, (TEXTS, TEXTS), tmp_path / name, lambda progress: None) for name in "ab"
    ]
    assert folders[0].name == "a.partial"
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()
    assert kl_to(teacher, Loaded.open(folders[0])) < 0.7 * before
    assert {"config.json", "tokenizer.json"} <= {path.name for path in folders[0].iterdir()}


def test_wrong_pairs_are_refused_and_nothing_is_written(pair, tmp_path):
    student, teacher = pair
    report = lambda progress: None  # noqa: E731
    small = open_model(tmp_path / "small", TEACHER | {"vocab_size": 4000})
    with pytest.raises(ConfigError, match=r"small has another vocabulary than student \(4000 and 4096 tokens\)"):
        distill(student, small, RECIPE, (TEXTS, TEXTS), tmp_path / "out", report)
    folder = teacher.folder.path
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another vocabulary"):
        distill(student, Loaded.open(folder), RECIPE, (TEXTS, TEXTS), tmp_path / "out", report)
    with pytest.raises(ConfigError, match="nothing can be learned"):
        distill(student, student, RECIPE, (Texts("here", {"a": ""}), TEXTS), tmp_path / "out", report)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ConfigError, match="exists already"):
        distill(student, student, RECIPE, (TEXTS, TEXTS), tmp_path / "out", report)
    assert not (tmp_path / "out.partial").exists()
