from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hexllm.core.errors import CheckpointError, ConfigError, RequestError
from hexllm.server.tokenizer import Tokenizer, check_tokenizer_fits
from tests.server.conftest import write_tokenizer


def test_a_prompt_gets_its_bos_and_a_chat_gets_only_the_template_s(tokenizer):
    assert tokenizer.encode("Hello")[0] == 0
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(0) == 1
    assert text.endswith("<|im_start|>assistant\n")


def test_the_end_tokens_are_the_tokenizer_s_and_the_chat_turn_s(tokenizer):
    assert tokenizer.eos_token_ids == (1, 3)  # <|eos|>, <|im_end|>


def test_a_template_s_own_variables_reach_it(tokenizer):
    message = [{"role": "user", "content": "Hi"}]
    assert "LOUD" in tokenizer.render_chat(message, {"shout": True})
    assert "LOUD" not in tokenizer.render_chat(message)


def test_a_template_that_refuses_is_a_request_error(tokenizer):
    with pytest.raises(RequestError, match="no such talk") as caught:
        tokenizer.render_chat([{"role": "user", "content": "refuse me"}])
    assert caught.value.param == "messages"


def test_without_a_template_a_chat_is_refused_with_the_way_out(tmp_path):
    bare = Tokenizer.from_directory(write_tokenizer(tmp_path, chat_template=None))
    assert bare.eos_token_ids == (1,)
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions"):
        bare.render_chat([{"role": "user", "content": "Hi"}])


def test_an_empty_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"No usable tokenizer in .*--tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_token_bytes_are_the_token_s_own(tokenizer):
    ids = tokenizer.encode("Grüße 🙂", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "Grüße 🙂".encode()
    assert tokenizer.token_bytes(3) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_part_of_a_character_is_written_as_bytes(tokenizer):
    (first,) = (i for i in range(400) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(first) == "bytes:\\xf0"


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    check_tokenizer_fits(tokenizer, 400, "tiny")
    with pytest.raises(ConfigError, match=r"tiny has end token 3.*only 3 tokens"):
        check_tokenizer_fits(tokenizer, 3, "tiny")


def test_threads_may_encode_at_once(tokenizer):
    text = "Grüße 🙂 " * 500
    expected = tokenizer.encode(text)
    with ThreadPoolExecutor(4) as pool:
        assert all(ids == expected for ids in pool.map(tokenizer.encode, [text] * 32))


def test_truncation_saved_with_the_tokenizer_is_not_applied(tmp_path):
    write_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert len(Tokenizer.from_directory(tmp_path).encode("one two three four five six")) > 4


def test_the_server_never_imports_jax():
    code = (
        "import sys, pkgutil, importlib, hexllm.server as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    if module.name != 'demo': importlib.import_module('hexllm.server.' + module.name)\n"
        "bad = [name for name in ('jax', 'flax', 'torch', 'transformers') if name in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
