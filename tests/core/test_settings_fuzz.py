"""Whatever is given, the answer is settings or a ConfigError, and never another exception."""

import contextlib

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hexllm.core.errors import ConfigError
from hexllm.core.settings import PluginSettings, Settings, load_settings

NAMES = st.sampled_from(
    [
        *Settings.model_fields,
        *(f"plugins.{name}" for name in PluginSettings.model_fields),
        *("max_running_seqs", "options.a", "options.a.b", "options.a.b.c", "nothing", "", "."),
    ]
)
TEXT = st.one_of(
    st.sampled_from(["", "1", "-1", "0.5", "none", "true", "[1]", "{", "a,b", "=", "nan", "1e400"]),
    st.text(max_size=4),
)
WORDS = st.one_of(
    TEXT,
    st.builds("--{}={}".format, NAMES, TEXT),
    st.builds("--{}{}".format, st.sampled_from(["", "no-", "no_"]), NAMES),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab\n é", max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.one_of(NAMES, st.integers()), inner, max_size=2),
    ),
    max_leaves=5,
)


def load(argv, environ):
    with contextlib.suppress(ConfigError):
        loaded = load_settings(argv, environ)
        assert loaded.model
        assert isinstance(loaded.port, int)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(WORDS.filter(lambda word: word not in ("-h", "--help")), max_size=5),
    st.dictionaries(
        NAMES.map(lambda name: "HEXLLM_" + name.upper().replace(".", "__")), TEXT, max_size=3
    ),
)
def test_any_words_and_variables(argv, environ):
    environ.pop("HEXLLM_CONFIG", None)
    load([word for word in argv if not word.startswith("--config")], environ)


@settings(max_examples=200, deadline=None)
@given(table=st.dictionaries(st.one_of(NAMES, st.text(max_size=3)), VALUES, max_size=4))
def test_any_file(table, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(table, allow_unicode=True), encoding="utf-8")
    load([f"--config={path}", "--model=x"], {})
