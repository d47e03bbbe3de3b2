"""Where settings come from: the command line, the environment, a file.

Each source gives nested values for pydantic-settings to merge, remembers how each value was
written, so that an error can quote it, and collects every mistake in names instead of stopping
at the first.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_settings import PydanticBaseSettingsSource

from hexllm.core.settings.fields import ALIASES, Settings, is_switch
from hexllm.core.settings.not_yet import RETIRED
from hexllm.core.settings.plugin_table import PluginSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic.fields import FieldInfo

    Key = tuple[str, ...]

ENV_PREFIX = "HEXLLM_"

#: Variables of Hex-LLM and of Vertex AI that set a setting, below ``HEXLLM_<NAME>``.
FOREIGN_VARIABLES = {
    "HEX_LLM_LOG_LEVEL": "log_level",
    "HEX_LLM_VERBOSE_LOG": "verbose_log",
    "AIP_HTTP_PORT": "port",
    "AIP_HEALTH_ROUTE": "health_route",
    "AIP_PREDICT_ROUTE": "predict_route",
}

#: Variables under our prefix that are read where they are needed and are no settings.
OTHER_VARIABLES = {"HEXLLM_CACHE": "directory for whatever hexllm keeps between starts"}


def key_of(name: str) -> Key:
    """Return the path of a setting from its dotted name, with aliases and dashes settled."""
    head, *rest = name.split(".")
    head = head.replace("-", "_")
    if head == "plugins":
        rest = [part.replace("-", "_") for part in rest]
    return (ALIASES.get(head, head), *rest)


def is_known(key: Key) -> bool:
    """Return whether a path names a setting that takes a value."""
    if key[0] == "plugins":
        return len(key) == 2 and key[1] in PluginSettings.model_fields
    if key[0] == "options":
        return len(key) >= 3 and all(key)
    return len(key) == 1 and key[0] in Settings.model_fields


def takes_no_value(key: Key) -> bool:
    """Return whether a path names a setting that is true or false."""
    return key == ("plugins", "strict") or (len(key) == 1 and is_switch(key[0]))


def nearest(name: str, *, on_command_line: bool = False) -> str | None:
    """Return the setting whose name is closest to ``name``, None when none is close.

    Only the command line has names that start with ``no-``.
    """
    import difflib

    names = [*Settings.model_fields, *ALIASES]
    names += [f"plugins.{field}" for field in PluginSettings.model_fields]
    wanted = name.lower().replace("-", "_")
    if wanted.startswith("no_"):
        if not on_command_line:
            wanted = wanted[3:]
        else:
            names = [f"no_{field}" for field in names if takes_no_value(key_of(field))]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    # A flag cut short (--tensor_parallel) is far from its name by letters, and yet plain.
    close = close or [field for field in names if len(wanted) > 3 and field.startswith(wanted)]
    return close[0] if close else None


class Source(PydanticBaseSettingsSource):
    """Values, how each was written, and the mistakes found on the way.

    Attributes:
        values: Nested values by setting.
        written: Each given path -> the value as it was written and where, for error messages.
        problems: Sentences.
    """

    def __init__(self) -> None:
        super().__init__(Settings)
        self.values: dict[str, Any] = {}
        self.written: dict[Key, str] = {}
        self.problems: list[str] = []

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return one setting's value, as pydantic-settings asks for it."""
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the nested values, as pydantic-settings asks for them."""
        return self.values

    def put(self, key: Key, value: Any, written: str) -> None:
        """Keep a value; a later one for the same path replaces it."""
        table = self.values
        for depth, part in enumerate(key[:-1], start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                self.problems.append(
                    f"{written} and {self.written[key[:depth]]} cannot both hold. "
                    f"Remove one of them."
                )
                return
        table[key[-1]] = value
        self.written[key] = written

    def unknown(self, written: str, close: str | None) -> None:
        """Record that something is no setting; ``close`` is the nearest one, as it is written."""
        advice = (
            f"Write {close} instead, or remove it."
            if close
            else "Remove it; 'hexllm serve --help' lists the settings."
        )
        self.problems.append(f"{written} is not a setting of hexllm. {advice}")


class CommandLine(Source):
    """``--name=value``, ``--name value``, ``--switch``, ``--no-switch``, ``--plugins.load=a,b``."""

    place = "on the command line"

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__()
        words = list(argv)
        while words:
            word = words.pop(0)
            if not word.startswith("--") or word == "--":
                self.problems.append(
                    f"{word!r} {self.place} belongs to no flag. Write --name=value, "
                    f"for instance --model={word if word.strip('-') else 'org/name'}."
                )
                continue
            name, equals, value = word[2:].partition("=")
            self._take(name, value if equals else None, words)

    def _take(self, name: str, value: str | None, words: list[str]) -> None:
        key = key_of(name)
        flat = name.replace("-", "_")
        if flat in RETIRED:
            if value is None and words and not words[0].startswith("--"):
                words.pop(0)
            self.problems.append(
                f"--{name} {self.place} is of Hex-LLM's first server, and hexllm follows the "
                f"later one. {RETIRED[flat]}"
            )
        elif not is_known(key) and flat.startswith("no_") and is_known(key_of(flat[3:])):
            self._take_negation(name, key_of(flat[3:]), value)
        elif not is_known(key):
            close = nearest(name, on_command_line=True)
            self.unknown(f"--{name} {self.place}", close and "--" + re.sub("^no_", "no-", close))
            if value is None and words and not words[0].startswith("--"):
                words.pop(0)
        elif value is None and takes_no_value(key):
            if words and words[0].lower() in ("true", "false"):
                self.problems.append(
                    f"--{name} {words[0]} {self.place} is two words. "
                    f"Write --{name}={words.pop(0).lower()}."
                )
            self.put(key, True, f"--{name} {self.place}")
        elif value is None and (not words or words[0].startswith("--")):
            self.problems.append(f"--{name} {self.place} has no value. Write --{name}=VALUE.")
        else:
            self._take_value(name, key, words.pop(0) if value is None else value)

    def _take_negation(self, name: str, key: Key, value: str | None) -> None:
        positive = ".".join(key)
        if not takes_no_value(key):
            self.problems.append(
                f"--{name} {self.place}: {positive} is not true or false. Write --{positive}=VALUE."
            )
        elif value is not None:
            self.problems.append(
                f"--{name}={value} {self.place}: the --no- form takes no value. "
                f"Write --{name} or --{positive}={value}."
            )
        else:
            self.put(key, False, f"--{name} {self.place}")

    def _take_value(self, name: str, key: Key, value: str) -> None:
        written = f"--{name}={value} {self.place}"
        parsed: Any = value
        if key[0] == "plugins" and not takes_no_value(key):
            earlier = self.values.get("plugins", {}).get(key[1], ())
            parsed = (*earlier, *(part.strip() for part in value.split(",") if part.strip()))
        elif key[0] == "options":
            parsed = _option(value)
        self.put(key, parsed, written)


class Environment(Source):
    """``HEXLLM_<NAME>``, ``HEXLLM_PLUGINS__<NAME>``, ``HEXLLM_OPTIONS__<COMPONENT>__<NAME>``.

    An empty variable counts as unset, as container platforms set variables that way.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        for variable, name in FOREIGN_VARIABLES.items():
            if environ.get(variable):
                self.put((name,), environ[variable], f"{variable}={environ[variable]}")
        own: dict[Key, str] = {}
        for variable, value in sorted(environ.items()):
            is_ours = variable.startswith(ENV_PREFIX) and variable not in OTHER_VARIABLES
            if not is_ours or not value:
                continue
            name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            key = key_of(name)
            if not is_known(key):
                close = nearest(name)
                self.unknown(
                    f"{variable} in the environment",
                    close and ENV_PREFIX + close.upper().replace(".", "__"),
                )
            elif key in own:
                self.problems.append(
                    f"{variable} and {own[key]} in the environment are the same setting. "
                    f"Remove one of them."
                )
            else:
                own[key] = variable
                parsed = _option(value) if key[0] == "options" else value
                self.put(key, parsed, f"{variable}={value}")
        for key, written in self.written.items():
            self.written[key] = f"{written} in the environment"


class ConfigFile(Source):
    """A TOML or YAML file whose keys are the settings' names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._walk(_read(path), ())
        files = self.values.get("plugins", {}).get("files")
        if isinstance(files, str):
            files = [part.strip() for part in files.split(",") if part.strip()]
        if isinstance(files, list) and all(isinstance(name, str) for name in files):
            here = path.resolve().parent
            self.values["plugins"]["files"] = [
                str(here / Path(name).expanduser()) for name in files
            ]

    def _walk(self, table: Mapping[Any, Any], above: Key) -> None:
        for name, value in table.items():
            key = (*above, *((str(name),) if above else key_of(str(name))))
            dotted = ".".join((*above, str(name)))
            stands = f"{dotted} in {self.path}"
            if key == ("config",):
                self.problems.append(f"{stands} would be a second file. Remove it.")
            elif key in (("plugins",), ("options",)) or (key[0] == "options" and len(key) == 2):
                if isinstance(value, dict):
                    self._walk(value, key)
                else:
                    self.problems.append(f"{stands} is not a table. Write [{dotted}] and its keys.")
            elif not is_known(key):
                self.unknown(stands, nearest(dotted))
            elif key in self.written:
                self.problems.append(
                    f"{stands} and {self.written[key]} are the same setting. Remove one of them."
                )
            else:
                self.put(key, value, f"{dotted} = {_show(value)} in {self.path}")


def _option(text: str) -> Any:
    """Return a component's option as JSON where it is a list or table, else as the text it is."""
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(path: Path) -> dict[str, Any]:
    """Return the table in a file.

    Raises:
        ConfigError: It cannot be read, or is not a table in TOML or YAML.
    """
    from hexllm.core.errors import ConfigError

    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(
            f"--config={path} is neither TOML nor YAML by its name. Name it .toml, .yaml or .yml."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--config={path} cannot be read: {reason}. Give the path of a readable file "
            f"(looked for it from {os.getcwd()})."
        ) from error
    table: Any
    if suffix == ".toml":
        import tomllib

        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}. Correct that place.") from error
    else:
        import yaml

        try:
            table = yaml.safe_load(text)
        except yaml.YAMLError as error:
            where = " ".join(str(error).split())
            raise ConfigError(f"{path} is not valid YAML: {where}. Correct that place.") from error
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path} holds a {type(table).__name__}, not a table. Write lines such as 'port: 7080'."
        )
    return table
