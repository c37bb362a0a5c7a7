from tiny_parts import Choose, tiny_mamba


def tiny(choose: Choose) -> dict[str, object]:
    return {"model_type": "mamba", **tiny_mamba(choose)}
