from families import glm
from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    return {**glm.tiny(choose), "model_type": "glm4"}
