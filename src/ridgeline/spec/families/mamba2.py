"""Mamba-2: state-space duality and nothing else (arXiv 2405.21060)."""

from ridgeline.spec.common import ACTIVATIONS
from ridgeline.spec.common_recurrent import backbone_renames, check_inner, mamba2_renames, read_norm, read_pure_mamba
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Mamba2, Renames


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("time_step_rank")  # Mamba-2's step sizes have no bottleneck
    mixer = Mamba2(
        num_heads=config.integer("num_heads", 128),
        head_dim=config.integer("head_dim", 64, high=1024),
        num_groups=config.integer("n_groups", 8),
        state_size=config.integer("state_size", 128),
        conv_taps=config.integer("conv_kernel", 4, high=64),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        norm_eps=read_norm(config).eps,
        dt_limits=config.limits("time_step_limit"),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
    )
    inner = config.integer("hidden_size") * config.integer("expand", 2, high=64)
    check_inner(inner, mixer.num_heads, mixer.head_dim)
    return read_pure_mamba(config, mixer, tied=False)


def renames(spec: DecoderSpec) -> Renames:
    return [*backbone_renames(), *mamba2_renames("backbone.layers.{i}.mixer")]
