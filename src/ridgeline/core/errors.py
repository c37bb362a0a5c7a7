"""Every error that Ridgeline raises on purpose.

    RidgelineError
    ├── ConfigError            an option, config.json or engine setting that cannot be honoured
    ├── ModelLoadError         a weight, tokenizer or index file that is missing, broken or does not fit
    │   └── MissingModelError      no such folder, file, bundled model or hub id
    ├── RequestError           the caller's request is wrong; fails alone            (HTTP 400)
    │   ├── ContextLengthError     prompt + max_tokens does not fit the context      (HTTP 400)
    │   └── ModelNotFoundError     no such model is served                           (HTTP 404)
    ├── OverloadedError        the queue is full or the engine is draining           (HTTP 503)
    └── EngineError            a step failed; our fault                              (HTTP 500)
        ├── WeightsLostError       the weights in use are damaged: no step can be computed any more
        └── QuarantinedError       the engine died of this request, twice                (HTTP 500)

A message says what was wrong, the value, and the fix. Imported by everything; imports nothing.
"""

NO_MEMORY = "out of memory: give the process more, or lower kv_cache_bytes and max_num_seqs"
TORCH_IS_MISSING = "torch is not installed; add it with pip install 'ridgeline[torch]'"


class RidgelineError(Exception):
    """Is the base of all errors raised on purpose."""


class ConfigError(RidgelineError):
    """Refuses an option or a model config that cannot be honoured."""


class ModelLoadError(RidgelineError):
    """A model file that is missing, broken, or does not match the declaration."""


class MissingModelError(ModelLoadError):
    """A name for which there is no model, here or on the hub."""


class RequestError(RidgelineError):
    """A request that is wrong in itself: `param` names the offending field, `code` is OpenAI's error code, or None."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The request needs more positions than the model or the cache has."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class OverloadedError(RidgelineError):
    """The engine takes no more work right now; retry later."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(RidgelineError):
    """A step failed for a reason that is not the request's."""


class WeightsLostError(EngineError):
    """The weights in use are damaged: the engine ends."""


class QuarantinedError(EngineError):
    """The engine died while it computed this request, and did so again: it is not tried a third time."""
