"""What ends an answer: a turn's end in a chat template of each family's style, and the union."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hexllm.core.errors import CheckpointError
from hexllm.core.settings import Settings
from hexllm.engine.overrides import end_tokens
from hexllm.server.state import ServerState
from hexllm.server.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_3 = """\
{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"""
LLAMA_4 = LLAMA_3.replace("_id", "").replace("start_header", "header_start")
LLAMA_2 = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PHI_3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
PHI_4 = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"""
QWEN_2 = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN_3 = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
OLMO_2 = """\
{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

#: Family -> (template, end token of the tokenizer, added tokens, what must end an answer).
FAMILIES = {
    "llama 2, code llama": (LLAMA_2, "</s>", ["<s>", "</s>"], {"</s>"}),
    "llama 3": (
        LLAMA_3,
        "<|end_of_text|>",
        ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
        {"<|end_of_text|>", "<|eot_id|>"},
    ),
    "llama 4": (
        LLAMA_4,
        "<|end_of_text|>",
        ["<|end_of_text|>", "<|header_start|>", "<|end_header|>", "<|eom|>", "<|eot|>"],
        {"<|end_of_text|>", "<|eot|>"},
    ),
    "gemma 1 to 3, codegemma": (
        GEMMA,
        "<eos>",
        ["<eos>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n"],
        {"<eos>", "<end_of_turn>"},
    ),
    "phi-3, phi-4-mini": (
        PHI_3,
        "<|endoftext|>",
        ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"],
        {"<|endoftext|>", "<|end|>"},
    ),
    "phi-4, phi-4-reasoning": (
        PHI_4,
        "<|endoftext|>",
        ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"],
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "qwen2": (
        QWEN_2,
        "<|endoftext|>",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "qwen3": (
        QWEN_3,
        "<|endoftext|>",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "mistral, mixtral": (
        MISTRAL,
        "</s>",
        ["<s>", "</s>", "[INST]", "[/INST]"],
        {"</s>"},
    ),
    "olmo-2": (
        OLMO_2,
        "<|endoftext|>",
        ["<|endoftext|>", "<|user|>", "<|assistant|>"],
        {"<|endoftext|>"},
    ),
}


def make_tokenizer(
    folder: Path,
    template: str | None,
    eos: str | None,
    added: list[str],
    *,
    special: bool = True,
) -> Tokenizer:
    """Return a byte-level tokenizer with these added tokens, from files."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.model = models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    backend.add_tokens(
        [
            AddedToken(token, special=special and not token.isspace(), normalized=False)
            for token in added
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": added[0]}
    config |= {} if eos is None else {"eos_token": eos}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(folder)


def texts(tokenizer: Tokenizer, ids: tuple[int, ...]) -> set[str]:
    assert len(set(ids)) == len(ids)
    return {tokenizer.token_text(token_id) for token_id in ids}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_are_the_tokenizer_s_and_the_turn_s(tmp_path, family):
    template, eos, added, expected = FAMILIES[family]
    tokenizer = make_tokenizer(tmp_path, template, eos, added)
    assert texts(tokenizer, tokenizer.eos_token_ids) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_s_end_counts_where_the_files_do_not_call_it_special(tmp_path, family):
    template, eos, added, expected = FAMILIES[family]
    tokenizer = make_tokenizer(tmp_path, template, eos, added, special=False)
    assert texts(tokenizer, tokenizer.eos_token_ids) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_does_not_hold_the_end_of_the_answer(tmp_path, family):
    """The template is honest: a chat that the model answers stops where its answer begins."""
    template, eos, added, _ = FAMILIES[family]
    tokenizer = make_tokenizer(tmp_path, template, eos, added)
    prompt = tokenizer.encode(
        tokenizer.render_chat([{"role": "user", "content": "Hi"}]), add_special_tokens=False
    )
    assert prompt[-1] not in tokenizer.eos_token_ids


def test_a_template_that_only_ends_turns_within_a_talk_is_asked_for_one(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% if not loop.last %}<|end|>{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(tmp_path, template, "<|eos|>", ["<|eos|>", "<|end|>"])
    assert texts(tokenizer, tokenizer.eos_token_ids) == {"<|eos|>", "<|end|>"}


def test_a_template_that_wants_the_user_s_word_last_is_given_it(tmp_path):
    template = (
        "{% if messages[-1].role != 'user' %}{{ raise_exception('ask something') }}{% endif %}"
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
    )
    tokenizer = make_tokenizer(tmp_path, template, "<|eos|>", ["<|eos|>", "<|end|>"])
    assert texts(tokenizer, tokenizer.eos_token_ids) == {"<|eos|>", "<|end|>"}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "{% for m in messages %}{{ m.role + ': ' + m.content + '### End' }}{% endfor %}",
        "{{ raise_exception('never') }}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}<|end|>{% endfor %}",
    ],
    ids=["nothing", "plain text", "refused", "assistant left out"],
)
def test_a_template_without_a_token_at_a_turn_s_end_adds_none(tmp_path, template):
    tokenizer = make_tokenizer(tmp_path, template, "<|eos|>", ["<|eos|>", "<|end|>"])
    assert texts(tokenizer, tokenizer.eos_token_ids) == {"<|eos|>"}


def test_a_template_alone_gives_an_end_where_the_tokenizer_has_none(tmp_path):
    tokenizer = make_tokenizer(tmp_path, GEMMA, None, ["<bos>", "<start_of_turn>", "<end_of_turn>"])
    assert texts(tokenizer, tokenizer.eos_token_ids) == {"<end_of_turn>"}


def test_the_template_of_a_multimodal_checkpoint_s_own_file_is_used(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": GEMMA}))
    added = ["<eos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = make_tokenizer(tmp_path, None, "<eos>", added)
    assert texts(tokenizer, tokenizer.eos_token_ids) == {"<eos>", "<end_of_turn>"}
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]).endswith("model\n")
    # The tokenizer's own template wins.
    tokenizer = make_tokenizer(tmp_path, OLMO_2, "<eos>", added)
    assert texts(tokenizer, tokenizer.eos_token_ids) == {"<eos>"}


def test_a_file_that_holds_no_template_is_an_error_that_names_it(tmp_path):
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"chat_template\.json holds no chat template"):
        make_tokenizer(tmp_path, None, "<eos>", ["<eos>"])


def test_a_server_ends_at_every_token_that_any_of_the_four_names(tmp_path):
    """Llama 3.1: its files name <|eom_id|> too; and a multimodal one's text_config counts."""
    template, eos, added, _ = FAMILIES["llama 3"]
    tokenizer = make_tokenizer(tmp_path, template, eos, added)
    ids = {token: tokenizer.encode(token, add_special_tokens=False)[0] for token in added}
    engine = FakeEngine([5])
    engine.info = SimpleNamespace(
        eos_token_ids=end_tokens(
            {"text_config": {"eos_token_id": [ids["<|eom_id|>"], ids["<|eot_id|>"]]}},
            {"eos_token_id": 7},
        )
    )
    state = ServerState(Settings(model="tiny"), engine, tokenizer=tokenizer)
    ends = state.eos_token_ids
    assert len(ends) == len(set(ends))
    assert set(ends) == {ids["<|end_of_text|>"], ids["<|eot_id|>"], ids["<|eom_id|>"], 7}
