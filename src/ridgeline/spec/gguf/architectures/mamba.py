"""Mamba and Falcon-Mamba."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, llama_tensors, one, read_sizes
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    # There are no attention and no feed-forwards; and any length will do.
    metadata.ignore("attention.head_count", "feed_forward_length", "context_length")
    sizes, inner = read_sizes(metadata, shapes), metadata.integer("ssm.inner_size")
    hidden = sizes["hidden_size"]
    assert isinstance(hidden, int)
    return {
        "model_type": "falcon_mamba" if metadata.flag("ssm.dt_b_c_rms", False) else "mamba",
        **sizes,
        "expand": inner // hidden,
        "intermediate_size": inner,
        "state_size": metadata.integer("ssm.state_size"),
        "time_step_rank": metadata.integer("ssm.time_step_rank"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon", low=0.0),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in shapes,
        "use_bias": "blk.0.ssm_in.bias" in shapes,
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    prefix, to = "blk.{i}.ssm", "layers.{i}.mamba"
    both = ("weight", "bias")
    inputs = [Rename(f"{prefix}_in.{part}", tuple(f"{to}.{name}.{part}" for name in "xz")) for part in both]
    inputs.append(Rename(f"{prefix}_x.weight", tuple(f"{to}.{name}.weight" for name in ("dt_low", "b", "c"))))
    names = {"conv1d": "conv", "dt": "dt", "out": "out"}
    return [
        *llama_tensors(),
        *(Stored(rename) for rename in inputs),
        *(one(f"{prefix}_{source}", f"{to}.{target}", part) for source, target in names.items() for part in both),
        Stored(Rename(f"{prefix}_a", (f"{to}.A_log",)), change="log of negative"),
        Stored(Rename(f"{prefix}_d", (f"{to}.D",))),
    ]
