"""How models mark their reasoning."""

from typing import NamedTuple

from ridgeline.core.errors import ConfigError


class ReasoningFormat(NamedTuple):
    """Tells what begins and ends reasoning, what is seen in such a chat template, and the names, vLLM's."""

    begin: str
    end: str
    seen: str
    names: tuple[str, ...]


_THINK = ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "hunyuan_a13b", "step3")
FORMATS = (
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", "<|START_THINKING|>", ("command_r",)),
    ReasoningFormat("[THINK]", "[/THINK]", "[/THINK]", ("mistral",)),
    ReasoningFormat("<seed:think>", "</seed:think>", "</seed:think>", ("seed_oss",)),
    ReasoningFormat("Here is my thought process:", "Here is my response:", "Here is my response:", ("granite",)),
    ReasoningFormat("<think>", "</think>", "</think>", _THINK),
)


def chosen_reasoning(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of a name, for "auto" the one of a chat template; None for "none". Raises ConfigError."""
    if name == "auto":
        return next((form for form in FORMATS if form.seen in template), None)
    named = {alias: form for form in FORMATS for alias in form.names}
    if name not in (*named, "none"):
        raise ConfigError(f"no reasoning parser {name!r}; choose one of auto, none, {', '.join(sorted(named))}")
    return named.get(name)
