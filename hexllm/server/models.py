"""``GET /v1/models``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hexllm.server.state import server_state

if TYPE_CHECKING:
    from hexllm.server.state import ServerState

router = APIRouter()


def _card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.settings.served_model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "hexllm",
        "root": state.settings.model,
        "parent": None,
        "max_model_len": state.info.max_model_len,
    }


@router.get("/v1/models", summary="The models served here")
async def models_route(request: Request) -> Response:
    """List the one model of this server."""
    return JSONResponse({"object": "list", "data": [_card(server_state(request))]})


@router.get("/v1/models/{name:path}", summary="One model")
async def model_route(request: Request, name: str) -> Response:
    """Describe the model, by one of its names."""
    state = server_state(request)
    state.check_model_name(name)
    return JSONResponse(_card(state))
