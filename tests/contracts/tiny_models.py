"""Random small models of every family, built by an oracle and loaded by Ridgeline: what the contract tests compare.

    model = build(family_name, seed, folder)        # writes config.json and model.safetensors into the folder
    expected = model.oracle_logits(token_ids_BT)    # transformers, eager attention, or the family's own oracle; fp32
    program, weights = model.lowered(context_length), model.weights

A family that transformers lacks has a file `oracle_<family>.py` here: its class `Model(config)` is a torch module whose
parameters are named as in published checkpoints and whose `forward(token_ids_BT)` gives logits [B, T, V]. It is written
from the paper and the published model's own words, with none of Ridgeline's code.

A prompt of `context_length` tokens is what makes the two comparable under dynamic and longrope scaling, whose
frequencies transformers chooses by the length of the sequence and Ridgeline by the configured context.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_model, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from families import tiny_config
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

SHORT_PROMPT = 9  # below every original context and most windows of the tiny configs
LONG_PROMPT = 40  # above them


@dataclass(frozen=True)
class TinyModel:
    """One random model: `config` as the family wrote it, `folder` as its oracle saved it."""

    config: dict[str, object]
    oracle: torch.nn.Module
    folder: ModelFolder
    spec: DecoderSpec
    weights: dict[str, torch.Tensor]

    def lowered(self, context_length: int) -> Program:
        return lower(self.spec, context_length)

    def oracle_logits(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        """fp32 [B, T, V]."""
        with torch.no_grad():
            if isinstance(self.oracle, PreTrainedModel):
                return self.oracle(token_ids_BT, use_cache=False).logits
            return self.oracle(token_ids_BT)

    def prompt(self, num_tokens: int, batch: int = 2) -> torch.Tensor:
        """Random token ids [B, T]."""
        generator = torch.Generator().manual_seed(num_tokens)
        return torch.randint(self.spec.vocab_size, (batch, num_tokens), generator=generator)


def implementation(family_name: str) -> dict[str, str]:
    """The plainest of transformers; of Falcon the second: the plainest adds ALiBi twice, to the mask and the logits."""
    attention = "sdpa" if family_name == "falcon" else "eager"
    return {"attn_implementation": attention, "experts_implementation": "eager"}


def build(family_name: str, seed: int, path: Path) -> TinyModel:
    config = tiny_config(family_name, seed)
    if has_own_oracle(family_name):
        oracle = own_oracle(config)
        randomize(oracle, seed)
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        save_file(dict(oracle.named_parameters()), path / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.manual_seed(seed)  # some parameters start at random, and `randomize` adds to them
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **implementation(family_name)).eval()
        randomize(oracle, seed)
        oracle.save_pretrained(path)
    folder = ModelFolder.open(path)
    spec = families.read_spec(folder.config)
    return TinyModel(config, oracle, folder, spec, as_tensors(load_weights(folder, spec, lower(spec), FLOAT32)))


def has_own_oracle(family_name: str) -> bool:
    return (Path(__file__).parent / f"{oracle_of(family_name)}.py").exists()


def oracle_of(model_type: str) -> str:
    return f"oracle_{model_type.replace('-', '_')}"


def own_oracle(config: Mapping[str, object]) -> torch.nn.Module:
    return import_module(oracle_of(str(config["model_type"]))).Model(config).eval()


def load_oracle(folder: Path) -> torch.nn.Module:
    """The oracle of a saved model, from its config.json and its tensors."""
    config = json.loads((folder / "config.json").read_text())
    if not has_own_oracle(config["model_type"]):
        return AutoModelForCausalLM.from_pretrained(folder, **implementation(config["model_type"])).eval()
    oracle = own_oracle(config)
    load_model(oracle, folder / "model.safetensors")
    return oracle


def learned(oracle: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The oracle's parameters, a tied one once, and the biases that it learns but keeps as buffers."""
    biases = {name: buffer for name, buffer in oracle.named_buffers() if name.endswith("_bias")}
    return dict(oracle.named_parameters()) | biases


def randomize(oracle: torch.nn.Module, seed: int) -> None:
    """Weights of a size at which every part of the model shows in the logits, more than a fresh model's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learned(oracle).values():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |difference| / max |expected|."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()
