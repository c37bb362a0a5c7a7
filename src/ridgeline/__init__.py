"""Ridgeline is an LLM inference engine and OpenAI-compatible server.

    from ridgeline import LLM, SamplingParams

    llm = LLM("python-9m")
    print(llm.generate("def fibonacci(n):", SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)

`LLM` is imported on first use, so that `import ridgeline` stays cheap.
"""

from typing import TYPE_CHECKING

from ridgeline.core.collector import long_lived_imports
from ridgeline.core.params import DiffusionParams, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from ridgeline.engine.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "DiffusionParams", "SamplingParams", "SpeculationParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        with long_lived_imports():
            from ridgeline.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
