"""ServerSettings: what the operator chooses about the HTTP side. Built by the command line, read by the server."""

import ipaddress
from dataclasses import dataclass, field
from typing import ClassVar

from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Bounds, timeouts and names. `served_model_names` empty: the model's own name. Raises ConfigError.

    `request_timeout_s` counts from arrival to the last token.
    """

    PANEL: ClassVar[str] = "Server"

    served_model_names: tuple[str, ...] = option(
        (), "Name of the model in the API; may be given several times.", flag="--served-model-name"
    )
    chat_template: str | None = option(
        None, "Jinja file to make prompts of messages. Default: the model's own.", metavar="FILE"
    )
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = option(10 * 2**20, "Maximum size of a request's body in bytes.", low=1)
    max_prompts: int = option(128, "Maximum number of prompts in one request.", low=1)
    max_outputs: int = option(1024, "Maximum number of outputs of one request.", low=1, flag="--max-outputs")
    request_timeout_s: float = option(
        600.0, "Seconds that a request may take, waiting included.", above=0.0, flag="--request-timeout"
    )
    stall_timeout_s: float = option(
        60.0, "Seconds that a client may leave a stream unread.", above=0.0, flag="--stall-timeout"
    )
    shutdown_timeout_s: float = option(
        30.0, "Seconds that open requests get after SIGTERM.", low=0.0, flag="--shutdown-timeout"
    )

    def __post_init__(self) -> None:
        check(self, lambda name, message: ConfigError(message))
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty; give one, or leave the option out")


def require_safe_host(host: str, *, api_key: str | None, insecure_no_auth: bool) -> None:
    """Raise ConfigError for a host that others can reach when nothing asks them for a key."""
    if api_key is None and not insecure_no_auth and not _is_loopback(host):
        raise ConfigError(
            f"host {host} can be reached by others and no API key is set: give --api-key, "
            "or --insecure-no-auth if something in front of the server checks who may use it"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
