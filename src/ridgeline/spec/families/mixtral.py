"""Mixtral: Mistral with eight experts in place of the feed-forward, of which every token uses two."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    decoder,
    expert_renames,
    llama_renames,
    read_attention,
    read_head_dim,
    read_rope,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, MixtureOfExperts, Rename, RmsNorm, Routing


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_theta=1e6)),
        window=config.optional_integer("sliding_window"),
    )
    return decoder(config, Layer(attention, read_experts(config), norm, norm), norm)


def read_experts(config: ConfigReader) -> MixtureOfExperts:
    """Read the experts of a config that spells them as Mixtral's do."""
    return MixtureOfExperts(
        num_experts=config.integer("num_local_experts", 8, high=MAX_EXPERTS),
        size=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        routing=Routing(config.integer("num_experts_per_tok", 2)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(), *expert_renames("block_sparse_moe", gate="w1", up="w3", down="w2")]
