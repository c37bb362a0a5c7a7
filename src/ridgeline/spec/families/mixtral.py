"""Mixtral: Mistral with eight experts in place of the feed-forward, of which every token uses two."""

from ridgeline.spec.common import ACTIVATIONS, MAX_EXPERTS, expert_renames, llama_renames, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, MixtureOfExperts, Renames, Routing


def read(config: ConfigReader) -> DecoderSpec:
    norm, window = rms_norm(config, 1e-5), config.optional_integer("sliding_window")
    return read_llama(config, norm, theta=1e6, window=window, ffn=read_experts(config))


def read_experts(config: ConfigReader) -> MixtureOfExperts:
    """Read the experts of a config that spells them as Mixtral's do."""
    return MixtureOfExperts(
        num_experts=config.integer("num_local_experts", 8, high=MAX_EXPERTS),
        size=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        routing=Routing(config.integer("num_experts_per_tok", 2)),
    )


def renames(spec: DecoderSpec) -> Renames:
    return [*llama_renames(), *expert_renames("block_sparse_moe", gate="w1", up="w3", down="w2")]
