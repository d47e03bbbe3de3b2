"""A tiny byte-level tokenizer, an engine that follows a script, and an application over both."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn

from hexllm.core.settings import Settings
from hexllm.server.app import create_app
from hexllm.server.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! Stop here.",
    "Grüße aus Köln, 你好世界 こんにちは 한국어 🙂🙃👩‍👩‍👧‍👦 é é ñ",
] * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('no such talk') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if shout %}LOUD{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Save the tiny tokenizer in Hugging Face's files; BOS is put before every prompt."""
    from tokenizers import (
        Tokenizer as Backend,
    )
    from tokenizers import (
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_directory(tokenizer_folder)


@pytest.fixture
def settings() -> Settings:
    return Settings(model="tiny/model", served_model_name="tiny", max_request_bytes=200_000)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    """Answers every prompt with the same sentence and then ends."""
    return FakeEngine(tokenizer.encode("Hello, world! Stop here.", add_special_tokens=False), eos=1)


@pytest.fixture
def app(settings: Settings, engine: FakeEngine, tokenizer: Tokenizer) -> Any:
    return create_app(settings, engine, tokenizer)


class AppClient:
    """A blocking client of an application, without a socket. Streams come as one text."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(ask())

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", path, **arguments)

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("POST", path, **arguments)


@pytest.fixture
def client(app: Any) -> AppClient:
    return AppClient(app)


class LiveServer:
    """The application behind uvicorn on a real socket, in a thread."""

    def __init__(self, app: Any, http: str = "auto") -> None:
        config = uvicorn.Config(
            app, port=0, log_config=None, lifespan="off", http=http, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def live(app: Any) -> Iterator[LiveServer]:
    with LiveServer(app) as server:
        yield server


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def error_of() -> Callable[[httpx.Response, int], dict[str, Any]]:
    """Check that an answer is an error object of a status, and return it."""

    def check(response: httpx.Response, status: int) -> dict[str, Any]:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    return check
