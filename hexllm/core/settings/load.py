"""Settings from the command line, the environment and a file, or one error that says it all."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hexllm.core.errors import ConfigError
from hexllm.core.settings.fields import Settings, is_optional, plain
from hexllm.core.settings.not_yet import NOT_YET, RETIRED_VALUES
from hexllm.core.settings.plugin_table import PluginSettings
from hexllm.core.settings.sources import CommandLine, ConfigFile, Environment, Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings: command line over environment over file over defaults.

    Args:
        argv: The words after the command's name; those of this process when None.
        environ: Environment variables; those of this process when None.

    Returns:
        Validated settings; ``plugins.files`` are absolute.

    Raises:
        ConfigError: Anything is unknown, of a wrong value or not built yet; all of it at once.
        SystemExit: With 0, once ``--help`` is answered.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    if "--help" in argv or "-h" in argv:
        from hexllm.core.settings.reference import help_text

        sys.stdout.write(help_text())
        raise SystemExit(0)

    sources: list[Source] = [CommandLine(argv), Environment(environ)]
    problems = [problem for source in sources for problem in source.problems]
    path = sources[0].values.get("config", sources[1].values.get("config"))
    if path and path.lower() != "none":
        try:
            sources.append(ConfigFile(Path(path).expanduser()))
            problems += sources[-1].problems
        except ConfigError as error:
            problems.append(str(error))
    if not any("model" in source.values for source in sources) and environ.get("AIP_STORAGE_URI"):
        storage = Source()
        uri = environ["AIP_STORAGE_URI"]
        storage.put(("model",), uri, f"AIP_STORAGE_URI={uri} in the environment")
        sources.append(storage)

    settings = None
    try:
        # Through a dict: type checkers see the fields only, not what BaseSettings takes besides.
        merged: dict[str, Any] = {"_build_sources": (tuple(sources), {})}
        settings = Settings(**merged)
    except ValidationError as error:
        problems += _sentences(error, sources, environ)
    if settings is None or problems:
        # Two wrong items of one list are one mistake.
        raise ConfigError(_joined([*dict.fromkeys(problems)]))
    _note_dtype(sources)
    return _with_absolute_files(settings)


def _with_absolute_files(settings: Settings) -> Settings:
    files = tuple(str(Path(name).expanduser().absolute()) for name in settings.plugins.files)
    plugins = settings.plugins.model_copy(update={"files": files})
    return settings.model_copy(update={"plugins": plugins})


def _note_dtype(sources: Sequence[Source]) -> None:
    given = next((s.values["dtype"] for s in sources if "dtype" in s.values), "auto")
    if given in ("float16", "half"):
        logger.warning("dtype=%s is served as bfloat16, as Hex-LLM did.", given)


def _joined(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings cannot be used:\n" + "\n".join(f"- {p}" for p in problems)


def _sentences(
    error: ValidationError, sources: Sequence[Source], environ: Mapping[str, str]
) -> list[str]:
    """Say each of pydantic's findings in one sentence that quotes what the user wrote."""
    sentences = []
    for finding in error.errors(include_url=False, include_context=False):
        location = finding["loc"]
        if not location:
            sentences.append(finding["msg"])
        elif location[0] == "model" and finding["type"] == "missing":
            sentences.append(_no_model(environ))
        else:
            sentences += _sentence(location, finding["type"], sources)
    return sentences


def _no_model(environ: Mapping[str, str]) -> str:
    sentence = "No model is named. Give --model=PATH, --model=ORG/NAME or AIP_STORAGE_URI."
    # Vertex AI's notebooks set MODEL_ID as a label, which need not be a model that can be loaded.
    if environ.get("MODEL_ID"):
        sentence = (
            f"No model is named (MODEL_ID={environ['MODEL_ID']} in the environment is a label "
            f"only). Give --model={environ['MODEL_ID']}, if that is the model, or another."
        )
    return sentence


def _sentence(location: tuple[Any, ...], kind: str, sources: Sequence[Source]) -> list[str]:
    name = str(location[0])
    key = tuple(str(part) for part in location[: 2 if name == "plugins" else 1])
    source = next((source for source in sources if key in source.written), None)
    if source is None:  # a default that is made from --model, whose own error says it
        return []
    written, value = source.written[key], source.values[name]
    if kind == "not_yet":
        allowed, reason = NOT_YET[name]
        rest = "Leave it out"
        if allowed[0] is not None:
            rest += f" or give {plain(allowed[0])}"
        return [f"{written} is not possible yet: {reason}. {rest}."]
    if advice := RETIRED_VALUES.get((name, str(value))):
        return [f"{written} is not possible: {advice}"]
    field = (PluginSettings if name == "plugins" else Settings).model_fields[key[-1]]
    extra: dict[str, Any] = field.json_schema_extra  # type: ignore[assignment]
    accepts = extra["accepts"]
    if name != "plugins" and is_optional(name) and "none" not in accepts:
        accepts += ", or none"
    default = extra["shown_default"] or plain(field.get_default())
    rest = "Correct it"
    if not field.is_required():
        rest += f", or leave it out (default: {default})"
    return [f"{written} is not usable: it takes {accepts}. {rest}."]
