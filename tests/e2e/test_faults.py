"""What happens to a real server and engine when something goes wrong around them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.e2e.serving import environment, free_port, serve
from tests.engine.tiny import CONFIG
from tests.server.conftest import write_tokenizer

FLAGS = (
    "--num_blocks=512",
    "--block_size=8",
    "--max_running_seqs=4",
    "--prefill_len_padding=64",
    "--max_model_len=512",
)
#: Wide, so that a step takes long enough for a fault to come in the middle of a request.
WIDE = {
    **CONFIG,
    "vocab_size": 400,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}
ENDLESS = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(WIDE))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with serve(folder, f"--model={model}", "--load_format=dummy", *FLAGS) as served:
        yield served


def is_idle(served):
    return (
        served.metric("vllm:num_requests_running") == 0
        and served.metric("vllm:kv_cache_usage_perc") == 0
    )


def aborted(served):
    return served.metric("vllm:request_success_total", 'finished_reason="abort"')


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(served, stream):
    port = int(served.url.rsplit(":", 1)[1])
    before = aborted(served)
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        served.wait_for(lambda: served.metric("vllm:num_requests_running") == 1)
        steps = served.metric("hexllm:engine_steps_total")
    served.wait_for(lambda: is_idle(served))
    # It was dropped, not served to its end.
    assert served.metric("hexllm:engine_steps_total") - steps < ENDLESS["max_tokens"] // 2
    served.wait_for(lambda: aborted(served) == before + 1)


def test_the_retired_containers_command_starts_the_same_server(model, tmp_path):
    command = ("-m", "hex_llm.server.api_server")
    flags = ("--load_format=dummy", "--no-warmup", *FLAGS)
    env = environment(AIP_PREDICT_ROUTE="/predict-here", AIP_HEALTH_ROUTE="/health-here")
    with serve(tmp_path, f"--model={model}", *flags, command=command, env=env) as served:
        assert httpx.get(served.url + "/health-here").status_code == 200
        body = {"instances": [{"prompt": "Hello", "max_tokens": 3, "top_k": 1}]}
        for route in ("/generate", "/predict-here"):
            answer = served.post(route, body).json()
            assert answer["predictions"][0].startswith("Prompt:\nHello\nOutput:\n")


def test_a_killed_engine_errors_every_request_and_ends_the_server(model, tmp_path):
    flags = ("--load_format=dummy", "--no-warmup", *FLAGS)
    with serve(tmp_path, f"--model={model}", *flags) as served:
        served.complete(prompt="warm", max_tokens=2, temperature=0)
        answers = {}
        has_begun = threading.Event()

        def ask(stream):
            try:
                with httpx.stream(
                    "POST",
                    served.url + "/v1/completions",
                    json={**ENDLESS, "stream": stream},
                    timeout=60,
                ) as answer:
                    lines = []
                    for line in answer.iter_lines():
                        has_begun.set()
                        lines.append(line)
                    answers[stream] = (answer.status_code, lines)
            except httpx.HTTPError as error:
                answers[stream] = error

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        served.wait_for(lambda: served.metric("vllm:num_requests_running") == 2)
        assert has_begun.wait(60)
        os.kill(served.engine_pid(), signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        status, lines = answers[False]
        assert status in (500, 503)
        assert "engine" in json.loads("".join(lines))["error"]["message"]
        status, lines = answers[True]
        assert status == 200
        last = [line for line in lines if line.startswith("data: {")][-1]
        assert "engine" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert served.process.wait(20) == 1
    assert "Traceback" not in served.log.read_text()


def weights(config):
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = D // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (D,),
            f"{layer}.post_attention_layernorm": (D,),
            f"{layer}.self_attn.q_proj": (D, D),
            f"{layer}.self_attn.k_proj": (kv, D),
            f"{layer}.self_attn.v_proj": (kv, D),
            f"{layer}.self_attn.o_proj": (D, D),
            f"{layer}.mlp.gate_proj": (F, D),
            f"{layer}.mlp.up_proj": (F, D),
            f"{layer}.mlp.down_proj": (D, F),
        }
    return {name + ".weight": np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = {**CONFIG, "vocab_size": 400}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    save_file(weights(config), folder / "model.safetensors")
    return folder


def failed_start(model):
    flags = [f"--model={model}", "--host=127.0.0.1", f"--port={free_port()}", *FLAGS]
    done = subprocess.run(
        [sys.executable, "-m", "hexllm", "serve", *flags],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_truncated_checkpoint_does_not_start_and_names_the_file(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors" in failed_start(checkpoint)


def test_a_missing_tensor_does_not_start_and_is_named(checkpoint):
    tensors = weights({**CONFIG, "vocab_size": 400})
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight" in failed_start(checkpoint)


def test_a_misshaped_tensor_does_not_start_and_is_named(checkpoint):
    tensors = weights({**CONFIG, "vocab_size": 400})
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    save_file(tensors, checkpoint / "model.safetensors")
    message = failed_start(checkpoint)
    assert "model.norm.weight" in message
    assert "31" in message


def test_bad_requests_leave_the_server_serving(served):
    refused = {
        413: {"content": b'{"prompt": "' + b"x" * 11_000_000 + b'"}'},
        400: {"content": b'{"prompt": "x"'},
    }
    headers = {"Content-Type": "application/json"}
    for status, options in refused.items():
        answer = httpx.post(served.url + "/v1/completions", headers=headers, **options)
        assert answer.status_code == status, answer.text
    for body in (
        {"prompt": [1] * 513},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "temperature": "NaN"},
        {"prompt": [400]},
    ):
        assert served.post("/v1/completions", body).status_code == 400
    for raw in (b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}'):
        answer = httpx.post(served.url + "/v1/completions", content=raw, headers=headers)
        assert answer.status_code == 400, answer.text
    assert served.complete(prompt="Hello", max_tokens=2, temperature=0)["text"] is not None
    assert is_idle(served)
