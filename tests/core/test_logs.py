import logging

import pytest

from hexllm.core.logs import CHATTY, configure_logging
from hexllm.core.settings import Settings


@pytest.fixture(autouse=True)
def _root_logger():
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    # Taken off for the test: force=True closes the handlers that it finds.
    root.handlers.clear()
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, earlier in levels.items():
        logging.getLogger(name).setLevel(earlier)


def logged(capsys, **settings):
    configure_logging(Settings(model="x", **settings), "engine")
    logger = logging.getLogger("hexllm.some.part")
    logger.debug("low")
    logger.info("middle")
    logger.error("high")
    return capsys.readouterr().err.splitlines()


def test_messages_from_the_level_up_name_the_process(capsys):
    lines = logged(capsys)
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO engine: middle",
        "ERROR engine: high",
    ]
    assert len(logged(capsys, log_level="error")) == 1
    assert len(logged(capsys, log_level="DEBUG")) == 3


def test_verbose_names_the_place(capsys):
    (line,) = logged(capsys, log_level="ERROR", verbose_log=True)
    assert "ERROR engine hexllm.some.part:" in line
    assert "/MainThread: high" in line


def test_libraries_speak_from_warning_up_unless_debugging(capsys):
    configure_logging(Settings(model="x"), "server")
    logging.getLogger("httpx").info("HTTP Request: …")
    logging.getLogger("httpx").warning("odd")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING server: odd")
