"""Train a head that drafts for a model: EAGLE-3 (arXiv 2503.01840) or Medusa (2401.10774), in published layouts.

The model stays as it is. What a head learns is the model's own distribution of the tokens ahead, over a text; an EAGLE
head as it drafts: reading its own output where it has no hidden state of the model (training-time test).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.reference.dense import DenseMemory, DenseModel, dense_inputs, dense_values
from ridgeline.backends.reference.interpreter import interpret
from ridgeline.backends.reference.tensors import as_arrays, autocast
from ridgeline.compress.calibrate import Loaded
from ridgeline.compress.recipe import HeadRecipe
from ridgeline.compress.train import Loss, Progress, Recipe, TokenStream, initial_weights, train
from ridgeline.core.dtypes import BFLOAT16, Array, to_dtype
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import IntArray
from ridgeline.program.lower.heads import MedusaHeads, lower_eagle, lower_medusa, tapped
from ridgeline.program.op import FEATURES, LOGIT_ROWS, Program
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import SINGLE
from ridgeline.weights.heads import AUX_LAYERS, MODULES, read_eagle
from ridgeline.weights.save import new_folder, write_tensors

HEAD_TOKENS = 1 << 22
HELD_OUT_WINDOWS = 32
LATER_WEIGHT = 0.8  # of a token, beside the one drafted before it
OF_MODEL = (  # keys of the model's config.json that say what an EAGLE head's layer is like
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "vocab_size", "max_position_embeddings"),
)


class Head(Loss):
    """Compares what a head drafts with what the model says there.

    `program` has the head's step and all its own weights; `ids_K` are the tokens that it has logits of.
    """

    def __init__(
        self, model: Loaded, programs: Sequence[Program], layers: Sequence[int], ids_K: IntArray, tokens_ahead: int
    ) -> None:
        super().__init__()
        self._tapped, self._weights = tapped(model.program, layers), model.weights
        self.ids_K, self._tokens_ahead = torch.as_tensor(ids_K), tokens_ahead
        shapes = {name: shape for program in programs for name, shape in program.weights.items()}
        own = {name: shape for name, shape in shapes.items() if name.startswith("draft.")}
        self.program = replace(programs[-1], weights=own)

    def drafted(self, own: Mapping[str, Tensor], ids_BT: Tensor, hidden_BTW: Tensor, count: int) -> Tensor:
        """Return the logits of every token ahead of `count` places, [B, count, tokens ahead, K], of the model's hidden
        states at them."""
        raise NotImplementedError

    def stored(self, weights: Mapping[str, Array]) -> tuple[Mapping[str, object], dict[str, Array]]:
        """Return config.json and the tensors of a head with these weights."""
        raise NotImplementedError

    def forward(self, model: DenseModel, window_BT: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the mean cross entropy of the tokens ahead, nats, the nearer ones weighed higher."""
        logits_BTV, drafted = self.both(model, window_BT)
        said = self._ahead((logits_BTV[..., self.ids_K] - logits_BTV.logsumexp(-1, keepdim=True)).exp())
        loss_J = -(said * drafted.log_softmax(-1)).sum(-1).mean((0, 1))
        weights_J = LATER_WEIGHT ** torch.arange(len(loss_J))
        return (loss_J * weights_J).sum() / weights_J.sum()

    def both(self, model: DenseModel, window_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the model, [B, T, V], and of the head, [B, places, tokens ahead, K], in float32."""
        batch, length = window_BT.shape
        count = length - self._tokens_ahead
        with autocast(torch.bfloat16):
            with torch.no_grad():
                values = dense_values(self._tapped, self._weights, window_BT)
                hidden_BTW = torch.cat([values[name] for name in self._tapped.taps], -1).unflatten(0, (batch, length))
                logits_BTV = values[self._tapped.result].unflatten(0, (batch, length)).float()
            drafted = self.drafted({**self._weights, **model.named_weights()}, window_BT, hidden_BTW, count).float()
        return logits_BTV, drafted

    def _ahead(self, of_places: Tensor) -> Tensor:
        """Lay what the model has at each place, [B, T, ..], beside the place that drafts it, [B, places, ahead, ..]."""
        count = of_places.shape[1] - self._tokens_ahead
        return torch.stack([of_places[:, 1 + j : 1 + j + count] for j in range(self._tokens_ahead)], 2)

    def num_accepted(self, model: DenseModel, windows_BT: Tensor) -> float:
        """Return how many drafted tokens are right before the first wrong one, greedily, in the mean of the places."""
        with torch.inference_mode():
            logits_BTV, drafted = self.both(model, windows_BT)
        best = self._ahead(logits_BTV.argmax(-1))
        return float((self.ids_K[drafted.argmax(-1)] == best).cumprod(-1).sum(-1).float().mean())


class Eagle(Head):
    """One layer over a token and what precedes it, which drafts a token after the other."""

    def __init__(self, model: Loaded, ids_K: IntArray, tokens_ahead: int) -> None:
        num_layers = len(model.spec.layers)
        layers = aux_layers(num_layers)
        own = {key: model.folder.config[key] for key in OF_MODEL if key in model.folder.config}
        aux = {"use_aux_hidden_state": True, AUX_LAYERS: list(layers)}
        self.config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        self.config |= {**own, "draft_vocab_size": len(ids_K), "torch_dtype": "bfloat16", "eagle_config": aux}
        modules = ("fc.weight", "hidden_norm.weight", "lm_head.weight")
        head, self._vocab_size = read_eagle(ConfigReader(self.config), num_layers, modules)
        self._fold, self._step = lower_eagle(head, model.spec)
        super().__init__(model, (self._fold, self._step), head.layers, ids_K, tokens_ahead)

    def drafted(self, own: Mapping[str, Tensor], ids_BT: Tensor, hidden_BTW: Tensor, count: int) -> Tensor:
        batch = len(ids_BT)
        memory = DenseMemory((), batch, count)
        inputs = dense_inputs(ids_BT[:, :count]) | {FEATURES: hidden_BTW[:, :count].flatten(0, 1)}
        folded = interpret(self._fold, own, inputs, memory)[self._fold.result]
        features = [folded.float().unflatten(0, (batch, count))]  # norms want no bfloat16
        for number in range(1, self._tokens_ahead + 1):
            is_last, size = number == self._tokens_ahead, number * count
            tokens = torch.cat([ids_BT[:, 1 + i : 1 + i + count] for i in range(number)], 1)
            positions = torch.cat([torch.arange(count) + i for i in range(number)])
            memory = DenseMemory(self._step.states, batch, size, _visible(number, count))
            inputs = dense_inputs(tokens, positions) | {FEATURES: torch.cat(features, 1).flatten(0, 1)}
            if not is_last:
                inputs[LOGIT_ROWS] = inputs[LOGIT_ROWS][:0]
            values = interpret(self._step, own, inputs, memory)
            if is_last:
                return values[self._step.result].unflatten(0, (batch, self._tokens_ahead, count)).transpose(1, 2)
            features.append(values[self._step.taps[0]].float().unflatten(0, (batch, size))[:, -count:])
        raise AssertionError("a head drafts at least one token")

    def stored(self, weights: Mapping[str, Array]) -> tuple[Mapping[str, object], dict[str, Array]]:
        names = {ours: theirs for theirs, ours in MODULES.items()}
        tensors: dict[str, Array] = {}
        for name, weight in weights.items():
            module, _, part = name.rpartition(".")
            inside = "" if names[module] in ("fc", "norm", "lm_head") else "midlayer."
            tensors[f"{inside}{names[module]}.{part}"] = weight
        ids_K = self.ids_K.cpu().numpy()
        known_V = np.zeros(self._vocab_size, dtype=np.bool_)
        known_V[ids_K] = True
        return self.config, tensors | {"d2t": ids_K - np.arange(len(ids_K)), "t2d": known_V}


class Medusa(Head):
    """Heads over the model's last hidden state, one for each token ahead."""

    def __init__(self, model: Loaded, ids_K: IntArray, tokens_ahead: int) -> None:
        self._heads = MedusaHeads(tokens_ahead, 1, len(ids_K), bias=False, shares_head=False)
        self._program, self._spec = lower_medusa(self._heads, model.spec), model.spec
        super().__init__(model, (self._program,), (len(model.spec.layers),), ids_K, tokens_ahead)

    def drafted(self, own: Mapping[str, Tensor], ids_BT: Tensor, hidden_BTW: Tensor, count: int) -> Tensor:
        memory = DenseMemory((), len(ids_BT), count)
        inputs = dense_inputs(ids_BT[:, :count]) | {FEATURES: hidden_BTW[:, :count].flatten(0, 1)}
        logits = interpret(self._program, own, inputs, memory)[self._program.result]
        return logits.unflatten(-1, (self._heads.num_heads, -1)).unflatten(0, (len(ids_BT), count))

    def stored(self, weights: Mapping[str, Array]) -> tuple[Mapping[str, object], dict[str, Array]]:
        tensors = {"token_map": self.ids_K.cpu().numpy()}
        for name, weight in weights.items():
            short = name.removeprefix("draft.heads.")
            number, _, rest = short.partition(".")
            tensors[f"lm_heads.{number}.weight" if rest == "head.weight" else f"blocks.{short}"] = weight
        sizes = {"hidden_size": self._spec.hidden_size, "vocab_size": self._spec.vocab_size}
        config: dict[str, object] = {"architectures": ["MedusaModel"], "model_type": "medusa", **sizes}
        config |= {"num_heads": self._heads.num_heads, "num_hidden_layers": 1, "truncated_vocab_size": len(self.ids_K)}
        return config, tensors


HEADS: Mapping[str, type[Eagle] | type[Medusa]] = {"eagle3": Eagle, "medusa": Medusa}


def train_head(
    kind: str,
    model: Loaded,
    recipe: HeadRecipe,
    streams: tuple[TokenStream, TokenStream],
    out: Path,
    report: Callable[[Progress], None],
) -> Path:
    """Write a head of `HEADS`, trained on the first of two token streams, into a folder beside `out`, and return that.

    The folder is written at every evaluation, which counts the drafted tokens that are accepted on the second one.
    Raises ConfigError for a model without what a head needs, and for a held-out text shorter than a window.
    """
    if model.spec.head is None or not model.spec.layers:
        raise ConfigError(f"{model.folder.name} predicts no next token, so no head drafts for it")
    partial = new_folder(out)
    training, held_out = streams
    head = HEADS[kind](model, _frequent(training, recipe.draft_vocab_size, model.spec.vocab_size), recipe.draft_tokens)
    length = min(recipe.window_tokens, model.program.context_length, len(training) - 1)
    run = Recipe(
        num_tokens=recipe.tokens or HEAD_TOKENS,
        batch_tokens=recipe.batch_tokens,
        sequence_lengths=(length, length),
        matrix_rate=recipe.rate,
        vector_rate=recipe.rate,
        seed=recipe.seed,
    )
    drafting = DenseModel(head.program, _begun(head, model, recipe.seed))
    ends = range(length, len(held_out), length)[:HELD_OUT_WINDOWS]
    if not ends:
        raise ConfigError(f"the held-out text has {len(held_out)} tokens, and a window {length}; give a longer one")
    windows_BT = torch.as_tensor(np.stack([held_out[end - length : end] for end in ends]).astype(np.int64))
    for progress in train(drafting, run, training, lambda model: head.num_accepted(model, windows_BT), head):
        report(progress)
        if progress.held_out is not None:
            weights = as_arrays(drafting.named_weights())
            config, tensors = head.stored({name: to_dtype(weight, BFLOAT16) for name, weight in weights.items()})
            write_tensors(partial / SINGLE, tensors)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return partial


def _begun(head: Head, model: Loaded, seed: int) -> dict[str, Tensor]:
    """Return the weights that a head begins with: the model's output head, residual layers of 0, others random."""
    weights = initial_weights(head.program.weights, seed)
    output_VH = model.weights.get("head.weight", model.weights["embed.weight"])
    for name, weight in weights.items():
        if name.endswith("head.weight"):
            weight[:] = output_VH[head.ids_K]
        elif ".layers." in name:
            weight[:] = 0.0
    return weights


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs an EAGLE-3 head reads: the published ones, where these are three."""
    return (2 if num_layers >= 7 else num_layers // 4, num_layers // 2, num_layers - (3 if num_layers >= 7 else 1))


def _frequent(tokens: TokenStream, count: int, vocab_size: int) -> IntArray:
    """Return the ids of the `count` most frequent tokens, in order; all of them for a count of 0."""
    if not 0 < count < vocab_size:
        return np.arange(vocab_size)
    found = [token_id for token_id, _ in Counter(tokens.tolist()).most_common(count)]
    rest = (token_id for token_id in range(vocab_size) if token_id not in set(found))
    return np.array(sorted([*found, *islice(rest, count - len(found))]), dtype=np.int64)


def _visible(number: int, count: int) -> Tensor:
    """Return what each drafted token sees, bool [query, key]: of `number` rounds over `count` places, the text up to
    its place, as the first round has it, and what was drafted from there."""
    text, same = torch.ones(count, count, dtype=torch.bool).tril(), torch.eye(count, dtype=torch.bool)
    none = torch.zeros_like(text)
    rows = [[text if k == 0 else same if k <= i else none for k in range(number)] for i in range(number)]
    return torch.cat([torch.cat(row, 1) for row in rows])
