"""DecoderSpec: what a decoder-only language model is, as frozen data.

A layer is a mixer and a feed-forward, each a type of its own: a new kind of layer is a new dataclass in a file beside
this one, never another flag on an old one. All of them can be imported from here, but for the kinds of ropes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.spec.attention import GroupedQueryAttention, LatentAttention, check_shared_kv
from ridgeline.spec.experts import ClampedSwiGlu, MixtureOfExperts, Routing
from ridgeline.spec.parts import Activation, GatedMlp, LayerNorm, Mlp, Norm, RmsNorm, Rope, UnweightedRmsNorm
from ridgeline.spec.recurrent import GatedDeltaNet, LightningAttention, Mamba, Mamba2, RecurrentMixer

__all__ = [
    "AnyLayer",
    "Classifier",
    "DecoderSpec",
    "Embedding",
    "FeedForward",
    "Head",
    "Layer",
    "MaskedDiffusion",
    "Mixer",
]
__all__ += ["NormedResidualLayer", "ParallelLayer", "PostNormLayer", "Predictor", "Rename", "Renames"]
__all__ += ["ClampedSwiGlu", "GroupedQueryAttention", "LatentAttention", "MixtureOfExperts", "Routing"]
__all__ += ["Activation", "GatedMlp", "LayerNorm", "Mlp", "Norm", "RmsNorm", "Rope", "UnweightedRmsNorm"]
__all__ += ["GatedDeltaNet", "LightningAttention", "Mamba", "Mamba2"]

Mixer = GroupedQueryAttention | LatentAttention | RecurrentMixer
FeedForward = GatedMlp | Mlp | MixtureOfExperts


@dataclass(frozen=True, slots=True)
class Layer:
    """x += post(mixer(pre(x))), then x += post(feed_forward(pre(x))).

    A missing norm is the identity; a missing mixer or feed-forward leaves its half out. Each half's output is
    multiplied by `residual_scale` before it is added.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    mixer_norm: Norm | None = None
    ffn_norm: Norm | None = None
    mixer_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """x += mixer(norm(x)) + feed_forward(norm(x)); with `ffn_norm` the feed-forward has a norm of its own."""

    mixer: Mixer
    feed_forward: FeedForward
    mixer_norm: Norm
    ffn_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """x = norm(x + mixer(x)), then x = ffn_norm(x + feed_forward(x)), as the first Transformers had it."""

    mixer: Mixer
    feed_forward: FeedForward
    mixer_norm: Norm
    ffn_norm: Norm


@dataclass(frozen=True, slots=True)
class NormedResidualLayer:
    """Computes x = norm(x), then x = a * x + b * mixer(x); the same again with the feed-forward (arXiv 2501.08313).

    The factors (a, b) of each half are `mixer_factors` and `ffn_factors`.
    """

    mixer: Mixer
    feed_forward: FeedForward
    mixer_norm: Norm
    ffn_norm: Norm
    mixer_factors: tuple[float, float]
    ffn_factors: tuple[float, float]


AnyLayer = Layer | ParallelLayer | PostNormLayer | NormedResidualLayer


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding, multiplied by `scale`; `num_positions` > 0 adds a learned position table of that length.

    The checkpoint's has `unused_positions` rows before. `num_types` > 0 adds the first row of a table of token types;
    where there is a classifier, that of the token's type. With a `norm` the sum is normalised before the first layer.

    `scale` is exact here and is rounded to the dtype of the table before it multiplies: in bf16, Gemma's
    sqrt(3072) = 55.43 is 55.5, as the model was trained.
    """

    scale: float = 1.0
    num_positions: int = 0
    unused_positions: int = 0
    num_types: int = 0
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Projection to the vocabulary, of the final norm's output times `scale`; `tied` reuses the token embedding."""

    tied: bool
    bias: bool = False
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Classifier:
    """A linear layer from one token's output to a logit for each label; with `dense`, tanh of another one before it."""

    labels: tuple[str, ...]
    token: Literal["first", "last"] = "last"
    dense: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """Tokens are decided by filling in masks, in any order (arXiv 2502.09992); logits are those of the own token."""

    mask_id: int


@dataclass(frozen=True, slots=True)
class Predictor:
    """Declares a layer that guesses the token behind the next one, of a token and the model's output before it.

    It reads both through one product; a `norm` each stands before that, and one behind the layer, before the model's
    head. To guess further its own output takes the place of the model's: behind the norm if `returns_normed`. Of
    several, `num_layers`, the first is used.
    """

    layer: AnyLayer
    norm: Norm
    returns_normed: bool
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Declares a whole decoder. `max_positions` is the longest context that the positions are declared for, in tokens.

    Without a `head` it is an encoder: its tokens all see one another, and what it gives is the last layer's output.
    A `classifier` stands in the head's place, also where there is one. A `predictor` drafts, if asked to.
    Raises ConfigError where a layer shares the keys and values of one that does not fit.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[AnyLayer, ...]
    final_norm: Norm | None
    head: Head | None
    embedding: Embedding = Embedding()
    diffusion: MaskedDiffusion | None = None
    classifier: Classifier | None = None
    predictor: Predictor | None = None

    @property
    def num_types(self) -> int:
        """The types that tokens have; those of type i are the vocabulary's ids, plus i times its size."""
        return max(self.embedding.num_types, 1) if self.classifier is not None else 1

    def __post_init__(self) -> None:
        check_shared_kv([layer.mixer for layer in self.layers])


@dataclass(frozen=True, slots=True)
class Rename:
    """A checkpoint tensor `source`, and the program weights that are made of it; `{i}` stands for the layer number.

    With several `targets` the tensor is cut along its rows, into as many as each target has: one target after the other
    within each of `groups` equal parts. `transpose`: the checkpoint stores [.., in, out] (GPT-2's Conv1D); it is turned
    to [.., out, in] before cutting. `{e}` in the source stands for the number of an expert or a head, of which the
    targets are stacks. `experts`: the targets are stacks over the experts; without `{e}` in the source the tensor holds
    all of them, each of which is cut.
    If several renames make one weight, the first says how it is written, and the first that is there how it is read.
    Without targets, all tensors whose names begin with `source` are left unread, unless the program has weights among
    them: parts of the model beside its decoder.
    `depthwise`: the checkpoint stores [channels, 1, taps], a convolution of each channel by itself.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
    depthwise: bool = False
    experts: bool = False
    groups: int = 1


Renames = Sequence[Rename]
