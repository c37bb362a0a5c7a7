"""Reads vLLM's `speculative_config`, a JSON object or a mapping, as options of SpeculationConfig."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, cast

from ridgeline.core.errors import ConfigError

SAME = (
    *("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("draft_sample_method", "rejection_sample_method", "lookahead_window", "lookahead_ngram", "lookahead_guesses"),
)
METHODS = {
    **dict.fromkeys(("ngram", "[ngram]"), "ngram"),
    **dict.fromkeys(("mtp", "deepseek_mtp", "qwen3_next_mtp"), "mtp"),
    **{name: name for name in ("suffix", "lookahead", "auto")},
}
WITH_MODEL = {"draft_model": "draft", "eagle": "eagle", "eagle3": "eagle", "medusa": "medusa"}
# What asks for nothing beyond what is done, whatever the value, and what does so with one value alone.
WITHOUT_MEANING = ("enforce_eager", "disable_padded_drafter_batch", "disable_eagle_block_drop")
NEUTRAL: Mapping[str, object] = {"draft_tensor_parallel_size": 1}
KNOWN = ("method", "model", "quantization", "adaptive", "parallel_drafting", *SAME, *WITHOUT_MEANING, *NEUTRAL)


def speculation_options(given: str | Mapping[str, object]) -> dict[str, Any]:
    """Return the options by their keywords. Raises ConfigError, naming the key, for what is not known or not there."""
    keys = _keys(given)
    for name, value in keys.items():
        if name not in KNOWN:
            close = get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(KNOWN)}"
            raise ConfigError(f"speculative_config: unknown key {name!r}; {hint}")
        if name in NEUTRAL and value not in (None, NEUTRAL[name]):
            raise ConfigError(f"speculative_config: {name} must be {NEUTRAL[name]!r}, got {value!r}")
    if keys.get("rejection_sample_method") == "synthetic":
        fix = "drafts that are right at a given rate are measured by python -m benchmarks.speculation.oracle"
        raise ConfigError(f"speculative_config: rejection_sample_method 'synthetic' accepts wrong tokens; {fix}")
    options: dict[str, Any] = {name: keys[name] for name in SAME if keys.get(name) is not None}
    if keys.get("quantization") is not None:
        options["draft_quantize"] = keys["quantization"]
    if "prompt_lookup_max" in options and "prompt_lookup_min" not in options:
        options["prompt_lookup_min"] = min(2, options["prompt_lookup_max"])
    elif "prompt_lookup_min" in options and "prompt_lookup_max" not in options:
        options["prompt_lookup_max"] = max(5, options["prompt_lookup_min"])
    if keys.get("adaptive") is not None:
        options["adaptive_speculation"] = keys["adaptive"]
    return options | {"speculate": _speculate(keys)}


def _keys(given: str | Mapping[str, object]) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = cast("Mapping[str, object]", json.loads(given))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"speculative_config is no JSON: {str(error)[:100]}") from error
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"speculative_config must be an object, such as {{'method': 'ngram'}}, got {given!r:.100}")
    return given


def _speculate(keys: Mapping[str, Any]) -> str:
    """Return what drafts; where `method` is not said, the draft model that is named."""
    method, model, known = keys.get("method"), keys.get("model"), [*METHODS, *WITH_MODEL]
    if method is None:
        if model is None:
            raise ConfigError(f"speculative_config lacks its method: one of {', '.join(known)}")
        method = model if model == "[ngram]" else "draft_model"
    if not isinstance(method, str) or method not in known:
        raise ConfigError(f"speculative_config: method must be one of {', '.join(known)}, got {method!r:.100}")
    is_parallel = keys.get("parallel_drafting")
    if is_parallel not in (None, False) and (is_parallel is not True or method != "draft_model"):
        why = f"is true or false, and for draft models alone; got {is_parallel!r:.100} with method {method}"
        raise ConfigError(f"speculative_config: parallel_drafting {why}")
    if method in METHODS:
        if model not in (None, "[ngram]"):
            raise ConfigError(f"speculative_config: method {method} needs no model; leave model {model!r:.100} out")
        return METHODS[method]
    if not isinstance(model, str) or not model:
        raise ConfigError(f"speculative_config: method {method} needs model, the model or the head that drafts")
    return f"{'parallel' if keys.get('parallel_drafting') else WITH_MODEL[method]}:{model}"
