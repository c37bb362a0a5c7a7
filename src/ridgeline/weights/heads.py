"""Open EAGLE heads of every version: a folder with config.json and a safetensors file, for engine/companion.py."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.dtypes import FLOAT32, Array, to_dtype
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.core.step import IntArray
from ridgeline.program.lower.heads import EagleHead, lower_eagle, lower_predictor
from ridgeline.program.op import Program
from ridgeline.spec.common import read_attention, read_gated_mlp, read_head_dim
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, RmsNorm
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import StreamedWeights

MODULES: Mapping[str, str] = {
    "fc": "draft.fc",
    "embed_tokens": "draft.embed",
    "norm": "draft.final_norm",
    "lm_head": "draft.head",
    "hidden_norm": "draft.hidden_norm",
    "input_layernorm": "draft.embed_norm",
    "input_norm": "draft.input_norm",
    "post_attention_layernorm": "draft.ffn_norm",
    **{f"self_attn.{letter}_proj": f"draft.attn.{letter}" for letter in "qkvo"},
    **{f"mlp.{matrix}_proj": f"draft.ffn.{matrix}" for matrix in ("gate", "up", "down")},
}
PREFIX = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
READ_ELSEWHERE = (  # in the model's config, or in the head's tensors
    *("max_window_layers", "use_sliding_window", "sliding_window", "tie_word_embeddings", "bias", "layer_types"),
    *("max_position_embeddings", "draft_vocab_size", "target_hidden_size", "use_aux_hidden_state"),
    *("speculators_model_type", "speculators_version", "speculators_config"),
)


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A head before memory is taken: its programs, as `lower_eagle` says, and where their weights are in its file.

    Medusa heads have one, `step`, as `lower_medusa` says: `num_heads` of them. `layers` are those of the model whose
    inputs it reads. `token_ids_V` are the model's ids of the tokens that the head has logits of; None: the same ones.
    """

    path: Path
    fold: Program | None
    step: Program
    layers: tuple[int, ...]
    token_ids_V: IntArray | None
    checkpoint: Checkpoint
    stored: Mapping[str, str]
    num_heads: int = 0

    def tensors(self, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Return the weights in files of the head's own, in `dtype`."""
        return {name: to_dtype(self.checkpoint.tensor(stored), dtype) for name, stored in self.stored.items()}

    def shared(self, model: ModelFolder, spec: DecoderSpec, base: Program, dtype: np.dtype[Any]) -> StreamedWeights:
        """Return the weights in the model's files, which `base` computes with: all of them, and a predictor's."""
        own = {name: shape for name, shape in self.step.weights.items() if not name.startswith("draft.")}
        both = replace(base, ops=(*base.ops, *self.step.ops), weights={**base.weights, **own})
        return StreamedWeights(model, spec, both, dtype)


def open_predictor(model: ModelFolder, spec: DecoderSpec, base: Program) -> HeadSource:
    """Open the predictor in a model's own files. Raises ConfigError where there is none, ModelLoadError as loading."""
    if model.gguf is not None:
        raise ConfigError(f"{model.name}: predictor layers are not read from GGUF; leave speculate=mtp out")
    if spec.predictor is None:
        why = f"config.json declares none that is understood in a {spec.model_type}"
        raise ConfigError(f"{model.name} has no predictor layer: {why}; leave speculate=mtp out")
    programs, layers = lower_predictor(spec.predictor, spec), (len(spec.layers),)
    source = HeadSource(model.path, *programs, layers, None, Checkpoint(model.path, {}), {})
    try:
        source.shared(model, spec, base, FLOAT32)
    except ModelLoadError as error:
        fix = "leave speculate=mtp out, or complete the files"
        raise ModelLoadError(f"{model.name} cannot draft with its predictor layer; {fix}: {error}") from error
    return source


def open_eagle(name: str, target: DecoderSpec, target_name: str) -> HeadSource:
    """Open the head in a folder, or of a hub id, for a model.

    Raises ConfigError for one of another model or with keys that are not known, ModelLoadError for broken files.
    """
    folder = ModelFolder.open(name)
    checkpoint = Checkpoint.open(folder.path)
    modules = {PREFIX.sub("", stored): stored for stored in checkpoint.entries}
    if "fc.weight" not in modules:
        raise ModelLoadError(f"{folder.path} is no EAGLE head: it has no fc.weight")
    head, num_tokens = read_eagle(ConfigReader(folder.config), len(target.layers), modules)
    num_inputs = checkpoint.entries[modules["fc.weight"]].shape[1]
    hidden_size = num_inputs // (len(head.layers) if head.is_version_3 else 2)
    check_sizes(folder.path, hidden_size, num_tokens, target, target_name)
    token_ids_V = None
    if "d2t" in modules:
        token_ids_V = np.arange(head.vocab_size) + checkpoint.tensor(modules["d2t"]).astype(np.int64)
    elif head.vocab_size != target.vocab_size:
        raise ModelLoadError(f"{folder.path} lacks d2t, the model's ids of the {head.vocab_size:,} tokens it drafts")
    if not head.own_head and head.vocab_size != target.vocab_size:
        raise ModelLoadError(f"{folder.path} lacks lm_head.weight, for the {head.vocab_size:,} tokens it drafts")
    known_modules = {**MODULES, **{f"fc_norm.{at}": f"draft.fc_norm.{at}" for at in range(len(head.layers))}}
    split = ((*short.rpartition("."), name) for short, name in modules.items())
    stored = {f"{known_modules[module]}.{part}": name for module, _, part, name in split if module in known_modules}
    source = HeadSource(folder.path, *lower_eagle(head, target), head.layers, token_ids_V, checkpoint, stored)
    known = {*stored.values(), *(modules[name] for name in ("d2t", "t2d") if name in modules)}
    check_tensors(source, known, target.vocab_size)
    return source


def read_eagle(config: ConfigReader, num_layers: int, modules: Collection[str]) -> tuple[EagleHead, int]:
    """Read a head for a model of `num_layers` layers, and the number of tokens that it knows.

    `modules` are the names of its tensors. Raises ConfigError for a key that is not understood.
    """
    nested, section = config.section("transformer_layer_config"), config.section("eagle_config")
    layer, aux = nested or config, section or config
    is_version_3 = "hidden_norm.weight" in modules
    layers = aux.integers(AUX_LAYERS, high=num_layers) or (2, num_layers // 2, num_layers - 3)
    if is_version_3 and min(layers) < 0:
        raise ConfigError(f"config.json: a model of {num_layers} layers has no {layers}; name others in {AUX_LAYERS}")
    head_dim = read_head_dim(layer)
    bias = layer.flag("attention_bias", layer.flag("qkv_bias", False))
    layer.expect("num_hidden_layers", 1)
    vocab_size = layer.integer("vocab_size")
    head = EagleHead(
        is_version_3=is_version_3,
        hidden_size=layer.integer("hidden_size"),
        vocab_size=config.integer("draft_vocab_size", vocab_size) if is_version_3 else vocab_size,
        layers=layers if is_version_3 else (num_layers,),
        attention=read_attention(layer, head_dim, read_rope(layer, head_dim), bias=bias),
        feed_forward=read_gated_mlp(layer, bias=layer.flag("mlp_bias", False)),
        norm=RmsNorm(layer.number("rms_norm_eps", 1e-6, low=0.0)),
        norm_before_residual=config.flag("norm_before_residual", False),
        norm_before_fc=is_version_3 and config.flag("norm_before_fc", False),
        fc_norm=is_version_3 and config.flag("fc_norm", False),
        norm_output=is_version_3 and config.flag("norm_output", False),
        fc_bias="fc.bias" in modules,
        own_embedding="embed_tokens.weight" in modules,
        own_head="lm_head.weight" in modules,
    )
    config.expect("parallel_drafting", False, None)
    for each in filter(None, (config, nested, section)):
        each.ignore(*READ_ELSEWHERE)
        each.finish()
    return head, vocab_size


def check_sizes(path: Path, hidden_size: int, num_tokens: int, target: DecoderSpec, target_name: str) -> None:
    """Raise ConfigError unless a head of this hidden size and vocabulary is one for `target`."""
    if (hidden_size, num_tokens) != (target.hidden_size, target.vocab_size):
        own = f"it is for a model of hidden size {hidden_size:,} and {num_tokens:,} tokens"
        other = f"this one has {target.hidden_size:,} and {target.vocab_size:,}"
        raise ConfigError(f"{path} cannot draft for {target_name}: {own}, and {other}")


def check_tensors(source: HeadSource, known: set[str], num_tokens: int) -> None:
    """Raise ModelLoadError unless the tensors are those that the programs read, of their shapes, and no others."""
    entries, ids = source.checkpoint.entries, source.token_ids_V
    weights = {**(source.fold.weights if source.fold else {}), **source.step.weights}
    shapes = {name: shape for name, shape in weights.items() if name.startswith("draft.")}
    problems = [f"{name} is not understood" for name in entries if name not in known]
    problems += [f"{stored} is not read" for name, stored in source.stored.items() if name not in shapes]
    problems += [f"{name.removeprefix('draft.')} is missing" for name in shapes if name not in source.stored]
    for name, stored in source.stored.items():
        entry = entries[stored]
        if entry.shape != shapes.get(name, entry.shape) or entry.dtype not in FLOATS:
            problems.append(f"{stored} is {entry.dtype} {list(entry.shape)} instead of {list(shapes[name])}")
    if ids is not None and (len(ids) != source.step.vocab_size or ids.min() < 0 or ids.max() >= num_tokens):
        problems.append(f"its {len(ids):,} token ids are not those of {num_tokens:,} tokens")
    if problems:
        raise ModelLoadError(f"{source.path}: {'; '.join(sorted(problems)[:5])}")
