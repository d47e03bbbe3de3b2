"""The HTTP application: every route over one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

import hexllm
from hexllm.server import chat, completions, health, metrics, models, vertex
from hexllm.server.errors import install_error_handlers
from hexllm.server.requests import ChatRequest, CompletionRequest, PredictInstance
from hexllm.server.state import ServerState

if TYPE_CHECKING:
    from pydantic import BaseModel

    from hexllm.core.plugins import Plugins
    from hexllm.core.settings import Settings
    from hexllm.engine.client import EngineClient
    from hexllm.server.tokenizer import Tokenizer

_ALWAYS_OPEN = ("/ping", "/health", "/version", "/metrics", "/openapi.json")
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": PredictInstance,
}


def create_app(
    settings: Settings,
    client: EngineClient,
    tokenizer: Tokenizer | None = None,
    plugins: Plugins | None = None,
) -> FastAPI:
    """Return the application that serves ``client``.

    Args:
        settings: What the server runs with.
        client: The engine, ready or still starting.
        tokenizer: May come later, in ``app.state.server.tokenizer``; nothing is served before.
        plugins: For the notify hooks.
    """
    app = FastAPI(title="hexllm", version=hexllm.__version__, docs_url=None, redoc_url=None)
    state = ServerState(settings, client, tokenizer, plugins)
    app.state.server = state
    install_error_handlers(app)
    if settings.health_route not in ("/ping", "/health"):
        app.add_api_route(settings.health_route, health.ping_route, methods=["GET"])
    shared = {
        "/v1/completions": completions.answer_completion,
        "/v1/chat/completions": chat.answer_chat,
    }.get(settings.predict_route)
    if settings.predict_route != "/generate":
        route = vertex.shared_route(shared) if shared else vertex.generate_route
        app.add_api_route(settings.predict_route, route, methods=["POST"])
    for module in (health, metrics, models, completions, chat, vertex):
        app.include_router(module.router)
    app.add_middleware(
        health.ReadinessGate, state=state, always_open=(*_ALWAYS_OPEN, settings.health_route)
    )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the bodies that the routes read themselves."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path, model in _BODIES.items():
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
            document["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": f"#/components/schemas/{model.__name__}"}
                    }
                },
            }
        app.openapi_schema = document
    assert app.openapi_schema is not None
    return app.openapi_schema
