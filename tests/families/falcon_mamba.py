from tiny_parts import Choose, tiny_mamba


def tiny(choose: Choose) -> dict[str, object]:
    return {"model_type": "falcon_mamba", **tiny_mamba(choose), "mixer_rms_eps": choose(1e-6, 1e-2)}
