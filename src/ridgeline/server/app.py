"""The app has routes, a lifespan and nothing else. Built by `serve` and tests; needs an engine that has not started."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.engine.client import EngineClient
from ridgeline.server.anthropic.messages import count_message_tokens, create_message
from ridgeline.server.anthropic.protocol import MessagesRequest, PromptFields
from ridgeline.server.batch.batches import Batches, BatchRequest, create_batch, list_batches, stored_batch
from ridgeline.server.batch.files import create_file, list_files, stored_file
from ridgeline.server.batch.store import Folder
from ridgeline.server.body import Post
from ridgeline.server.boundary import RequestBoundary, request_id_of
from ridgeline.server.errors import reply_to
from ridgeline.server.openai.chat import CHAT_BODY, create_chat_completion
from ridgeline.server.openai.completions import COMPLETION_BODY, create_completion
from ridgeline.server.openai.embeddings import EmbeddingRequest, create_embedding
from ridgeline.server.openai.items import COUNT_BODY, RESPONSES_BODY
from ridgeline.server.openai.models import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    change_adapters,
    list_models,
    retrieve_model,
)
from ridgeline.server.openai.responses import count_input_tokens, create_response, stored_response
from ridgeline.server.openai.scores import ClassifyRequest, RerankRequest, ScoreRequest, classify, rerank, score
from ridgeline.server.openai.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info
from ridgeline.server.openapi import openapi
from ridgeline.server.pages import describe_server, diagnose, explain_request, page, plan, recent_steps
from ridgeline.server.service import Service
from ridgeline.server.settings import ServerSettings
from ridgeline.text.tokenizer import Tokenizer


def create_app(engine: EngineClient, tokenizer: Tokenizer | None, settings: ServerSettings) -> Starlette:
    """Return an ASGI app over `engine`, which it starts and at its end drains and stops; `tokenizer` is its model's.

    `app.state.service` is what a runner needs to drain earlier, on a signal. Raises what Service does.
    """
    service = Service(engine, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        engine.start()
        if service.batches is not None:
            service.batches.start()
        try:
            yield
        finally:
            if service.canary is not None:
                await service.canary.close()
            await service.drain()

    app = Starlette(
        routes=_routes(service),
        middleware=[*_cors(settings), Middleware(RequestBoundary, service=service)],
        exception_handlers={HTTPException: _pass_on},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    if settings.files is not None:
        service.batches = Batches(app, service, Folder(Path(settings.files)))
    return app


def _routes(service: Service) -> list[Route]:
    adapts, tells = service.info.max_loras > 0, service.settings.enable_tokenizer_info_endpoint
    return [
        Route("/health", _health),
        Route("/ready", partial(_ready, service)),
        Route("/metrics", partial(_metrics, service)),
        Route("/v1/models", partial(list_models, service)),
        Route("/v1/models/{model_id:path}", partial(retrieve_model, service)),
        Route("/version", _version),
        Route("/openapi.json", openapi),
        Route("/ui", page),
        Route("/ui/{name:path}", page),
        Route("/explain/server", partial(describe_server, service)),
        Route("/explain/steps", partial(recent_steps, service)),
        Route("/explain/doctor", partial(diagnose, service)),
        Post("/explain/plan", service, plan, list[str]),
        Route("/v1/requests/{request_id}/explain", partial(explain_request, service)),
        Post("/v1/embeddings", service, create_embedding, EmbeddingRequest),
        *(Post(path, service, rerank, RerankRequest) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *(Post(path, service, score, ScoreRequest) for path in ("/score", "/v1/score")),
        Post("/classify", service, classify, ClassifyRequest),
        *(Post(path, service, tokenize, TokenizeRequest) for path in ("/tokenize", "/v1/tokenize")),
        *(Post(path, service, detokenize, DetokenizeRequest) for path in ("/detokenize", "/v1/detokenize")),
        *([Route("/tokenizer_info", partial(tokenizer_info, service))] if tells else []),
        *([Post("/v1/load_lora_adapter", service, change_adapters, LoadAdapterRequest)] if adapts else []),
        *([Post("/v1/unload_lora_adapter", service, change_adapters, UnloadAdapterRequest)] if adapts else []),
        Post("/v1/completions", service, create_completion, COMPLETION_BODY),
        Post("/v1/chat/completions", service, create_chat_completion, CHAT_BODY),
        Post("/v1/responses", service, create_response, RESPONSES_BODY),
        Post("/v1/responses/input_tokens", service, count_input_tokens, COUNT_BODY),
        Route("/v1/responses/{response_id}", partial(stored_response, service), methods=["GET", "DELETE"]),
        Route("/v1/responses/{response_id}/input_items", partial(stored_response, service)),
        Route("/v1/responses/{response_id}/cancel", partial(stored_response, service), methods=["POST"]),
        Route("/v1/files", partial(list_files, service)),
        Route("/v1/files", partial(create_file, service), methods=["POST"]),
        Route("/v1/files/{file_id}", partial(stored_file, service), methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", partial(stored_file, service)),
        Route("/v1/batches", partial(list_batches, service)),
        Post("/v1/batches", service, create_batch, BatchRequest),
        Route("/v1/batches/{batch_id}", partial(stored_batch, service)),
        Route("/v1/batches/{batch_id}/cancel", partial(stored_batch, service), methods=["POST"]),
        Post("/v1/messages", service, create_message, MessagesRequest),
        Post("/v1/messages/count_tokens", service, count_message_tokens, PromptFields),
    ]


def _cors(settings: ServerSettings) -> list[Middleware]:
    """Return what lets browsers in; outside of all else, so that pages can read errors too."""
    if not settings.cors_origins:
        return []
    methods, headers, exposed = ["GET", "POST", "DELETE"], ["*"], ["x-request-id", "retry-after"]
    return [Middleware(_Cors, settings.cors_origins, methods, headers, expose_headers=exposed)]


class _Cors(CORSMiddleware):
    """Sends preflights what every response has: an id, and where it refuses, the error object."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            named = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
            response = reply_to(RequestError(bytes(response.body).decode(), code="cors_refused")).response()
            response.headers.update(named)
        response.headers["x-request-id"] = response.headers["request-id"] = request_id_of(request_headers)
        return response


async def _pass_on(http: Request, error: Exception) -> NoReturn:
    """Raise every error on: RequestBoundary maps them all, and starlette is not to respond by itself."""
    if isinstance(error, HTTPException) and error.status_code == 405:  # of a path's routes starlette names the first's
        fitting = [route for route in http.app.routes if route.matches(http.scope)[0] is not Match.NONE]
        same = [route for route in fitting if route.path == fitting[0].path]
        error.headers = {"Allow": ", ".join(sorted(method for route in same for method in route.methods))}
    raise error


async def _health(http: Request) -> Response:
    """Return 200 while the process is alive, also when it drains: a restart would cure nothing."""
    return JSONResponse({"status": "ok"})


async def _ready(service: Service, http: Request) -> Response:
    """Return 200 only where a request would be taken now."""
    if not service.engine.accepting:
        return reply_to(OverloadedError("not ready: the engine is shutting down or has stopped")).response()
    return JSONResponse({"status": "ready"})


async def _version(http: Request) -> Response:
    return JSONResponse({"version": version("ridgeline")})


async def _metrics(service: Service, http: Request) -> Response:
    await asyncio.to_thread(service.metrics.look_at_memory)
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
