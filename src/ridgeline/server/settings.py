"""ServerSettings: what the operator chooses about the HTTP side. Built by the command line, read by the server."""

import ipaddress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option
from ridgeline.core.slo import Slo, parse_slos


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Bounds, timeouts and names. `served_model_names` empty: the model's own name. Raises ConfigError."""

    PANEL: ClassVar[str] = "Server"

    served_model_names: tuple[str, ...] = option((), "Name of the model in the API; may be given several times.")
    chat_template: str | None = option(
        None, "Chat template: a Jinja file, or a name. Default: the model's own.", metavar="FILE|NAME"
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Show chat template and special tokens at /tokenizer_info, for clients that make prompts themselves."
    )
    tool_call_parser: str = option(
        "auto", "How the model writes tool calls: none, or a parser's name. Default: what its chat template shows."
    )
    reasoning_parser: str = option(
        "auto", "How the model marks its reasoning: none, or a parser's name. Default: what its chat template shows."
    )
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = option(None, "TOML of clients, keys and limits; SIGHUP reads it again.", metavar="FILE")
    max_body_bytes: int = option(2 * 2**20, "Maximum size of a request's body in bytes.", low=1)
    max_bodies_bytes: int = option(128 * 2**20, "Maximum bytes of all bodies that are arriving.", low=1)
    max_connections: int = option(4096, "Maximum number of open connections; more get 503.", low=1)
    max_header_bytes: int = option(64 * 2**10, "Maximum size of request line and headers in bytes.", low=256)
    header_timeout_s: float = option(10.0, "Seconds in which request line and headers must arrive.", above=0)
    body_timeout_s: float = option(10.0, "Seconds in which a body must arrive, and one more for each 64 KiB.", above=0)
    idle_timeout_s: float = option(60.0, "Seconds after which a connection without a request is closed.", above=0)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name that clients may use; may be given several times. Default: any, or this machine's own names "
        "where neither a key nor another address is set.",
    )
    cors_origins: tuple[str, ...] = option((), "Origin of pages that may read responses; may be given several times.")
    tls_cert: str | None = option(None, "Certificate chain in PEM: the server speaks HTTPS.", metavar="FILE")
    tls_key: str | None = option(None, "Key of the certificate in PEM. Default: in the same file.", metavar="FILE")
    max_prompts: int = option(128, "Maximum number of prompts in one request.", low=1)
    max_outputs: int = option(1024, "Maximum number of outputs of one request.", low=1)
    max_messages: int = option(4096, "Maximum number of messages in one conversation.", low=1)
    max_response_logprobs: int = option(
        2**18,
        "Maximum log-probabilities that one request makes the server hold: positions, times those of each.",
        low=1,
    )
    max_queued_requests: int = option(1024, "Maximum outputs that wait beside those that run; more get 503.", low=1)
    max_queued_tokens: int = option(
        2**22, "Maximum prompt tokens and log-probabilities of open requests; more get 503.", low=1
    )
    max_stored_bytes: int = option(64 * 2**20, "Maximum bytes of responses that /v1/responses keeps for a key.", low=0)
    stored_response_age_s: float = option(3600.0, "Seconds for which /v1/responses keeps a response.", above=0)
    files: str | None = option(None, "Folder of /v1/files and /v1/batches. Default: there are none.", metavar="DIR")
    max_file_bytes: int = option(200 * 2**20, "Maximum size of a file that is uploaded in bytes.", low=1)
    max_files_bytes: int = option(2**33, "Maximum bytes of a key's files with which it may upload more.", low=1)
    grammar_timeout_s: float = option(2.0, "Seconds in which a request's schema or grammar must compile.", above=0)
    slo: str | None = option(
        None,
        "Objectives that /metrics counts requests by, and that options which are not given are planned for.",
        metavar="ttft=MS,tpot=MS",
    )
    kv_canary: int = option(
        0,
        "One of so many prompts is scored again with exact keys and values, where --kv-dtype rounds them, by a process "
        "of lowest priority; 0: none.",
        low=0,
    )
    explain: bool = option(True, "Tell clients where the time of their own requests went.")
    otlp_traces_endpoint: str | None = option(
        None, "Send a span for each request to this OpenTelemetry collector. Default: none is made.", metavar="URL"
    )
    metrics_compat: Literal["none", "vllm"] = option("none", "Show metrics under the names of another engine, too.")
    engine_process: bool = option(True, "Run the engine in a process of its own, started again when it dies or hangs.")
    request_timeout_s: float = option(600.0, "Seconds from a request's arrival to its last token.", above=0)
    stall_timeout_s: float = option(60.0, "Seconds that a client may leave a stream unread.", above=0)
    step_timeout_s: float = option(300.0, "Seconds after which a step that has not ended ends the engine.", above=0)
    shutdown_timeout_s: float = option(30.0, "Seconds that open requests get after SIGTERM.", low=0.0)

    @property
    def has_keys(self) -> bool:
        """Tell whether clients must send a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The objectives of `slo`. Raises ConfigError."""
        return parse_slos(self.slo or "")

    def __post_init__(self) -> None:
        check(self)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty; give one, or leave the option out")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("--tls-key is the key of a certificate: give that with --tls-cert")
        if self.slo is not None and not self.slos:
            raise ConfigError("--slo is empty: give objectives like ttft=500ms,tpot=50ms, or leave it out")


def only_local_names(settings: ServerSettings, host: str) -> ServerSettings:
    """Return settings that allow this machine's names alone, where neither a key nor `host` keeps web pages out."""
    if settings.allowed_hosts or settings.has_keys or not _is_loopback(host):
        return settings
    return replace(settings, allowed_hosts=tuple({"localhost", "127.0.0.1", "[::1]", host.lower()}))


def require_safe_host(host: str, *, has_keys: bool, insecure_no_auth: bool) -> None:
    """Raise ConfigError for a host that others can reach when nothing asks them for a key."""
    if not has_keys and not insecure_no_auth and not _is_loopback(host):
        fix = "or --insecure-no-auth if something in front of the server checks who may use it"
        what = f"host {host} can be reached by others and no API key is set"
        raise ConfigError(f"{what}: give --api-key or --api-key-file, {fix}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
