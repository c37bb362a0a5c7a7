"""Match layers with the rules of a configuration: regular expressions that come from strangers."""

import re
from functools import cache

from ridgeline.core.errors import ConfigError

MAX_PATTERN = 200  # characters
NESTED = re.compile(r"\)[*+{]")  # a repetition of a group, as (a*a)* and (a|a)*: time that grows exponentially


@cache
def pattern(text: str) -> re.Pattern[str]:
    """Compile a rule's regular expression. Raises ConfigError for one that is none, or could take forever."""
    if len(text) > MAX_PATTERN or NESTED.search(text):
        known = f"at most {MAX_PATTERN} characters, and no repetition of a repetition or of any group"
        raise ConfigError(f"quantization_config: the pattern {text[:MAX_PATTERN]!r} is not supported; {known}")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"quantization_config: the pattern {text!r} is no regular expression: {error}") from error
