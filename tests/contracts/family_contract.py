"""What every family must hold, as functions of a family's name: run on all files of the folder, and on the example
of docs/howto/add-a-family.md."""

from pathlib import Path

import pytest
import torch
from tiny_models import (
    LONG_PROMPT,
    SHORT_PROMPT,
    TinyModel,
    build,
    learned,
    load_oracle,
    relative_error,
)

from families import tiny_config
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.spec import families
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
from ridgeline.weights.save import save_weights

TOLERANCE = 1e-4
NUM_CONFIGS = 8  # random configs of each family that are computed


def check_family(name: str, seed: int, folder: Path) -> None:
    """Everything, on one random model."""
    model = build(name, seed, folder / "saved")
    check_spelling(model)
    check_parameters(model)
    check_logits(model)
    check_round_trip(model, folder / "again")


def check_spelling(model: TinyModel) -> None:
    """The config as published and as the oracle saves it are one model."""
    assert families.read_spec(model.config) == model.spec


def check_parameters(model: TinyModel) -> None:
    """Counted = loaded = what the oracle counts, but for parts that the family leaves unread."""
    program = model.lowered(SHORT_PROMPT)
    assert {name: tuple(weight.shape) for name, weight in model.weights.items()} == program.weights
    read = [tensor for name, tensor in learned(model.oracle).items() if not is_unread(model, name)]
    assert program.num_parameters == sum(tensor.numel() for tensor in read)


def is_unread(model: TinyModel, name: str) -> bool:
    """Whether the oracle's parameter is of a part that the family leaves unread."""
    renames = families.renames(model.spec)
    return any(rename.source in name for rename in renames if not rename.targets)


def check_logits(model: TinyModel) -> None:
    """Whole prompts, within the original context and the window, and beyond them."""
    for num_tokens in (SHORT_PROMPT, LONG_PROMPT):
        prompt_BT = model.prompt(num_tokens)
        expected = model.oracle_logits(prompt_BT)
        everything = torch.ones(num_tokens, num_tokens, dtype=torch.bool) if model.spec.head is None else None
        actual = dense_logits(model.lowered(num_tokens), model.weights, prompt_BT, visible_TT=everything)
        assert actual.shape == expected.shape
        error = relative_error(actual, expected)
        assert error <= TOLERANCE, f"{num_tokens} tokens: relative error {error:.2g} of {model.config}"


def check_round_trip(model: TinyModel, folder: Path) -> None:
    """What save_weights writes, load_weights and the oracle read back to the bit."""
    save_weights(folder, model.spec, as_arrays(model.weights), FLOAT32)
    for name in ("config.json", "generation_config.json"):
        if (model.folder.path / name).exists():
            (folder / name).write_bytes((model.folder.path / name).read_bytes())
    again = as_tensors(load_weights(ModelFolder.open(folder), model.spec, model.lowered(SHORT_PROMPT), FLOAT32))
    assert again.keys() == model.weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in model.weights.items())
    expected, found = dict(model.oracle.named_parameters()), dict(load_oracle(folder).named_parameters())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected if not is_unread(model, name))


def check_unknown_keys(name: str) -> None:
    """A key that the family does not know is refused by name, at the top and within the rope parameters."""
    config = tiny_config(name, 0)
    with pytest.raises(ConfigError, match="frobnication_rate"):
        families.read_spec(config | {"frobnication_rate": 0.5})
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, dict):
            with pytest.raises(ConfigError, match="frobnication_rate"):
                families.read_spec(config | {key: rope | {"frobnication_rate": 0.5}})
