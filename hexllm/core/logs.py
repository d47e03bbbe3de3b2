"""The log of every hexllm process, so that ``log_level`` and ``verbose_log`` mean one thing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hexllm.core.settings import Settings

#: Libraries whose INFO messages say nothing to an operator.
CHATTY = ("uvicorn.error", "httpx", "httpcore", "urllib3", "filelock", "asyncio", "jax", "torch")


def configure_logging(settings: Settings, process: str) -> None:
    """Send this process's log to standard error, from ``settings.log_level`` up.

    Replaces what was configured before, so that a process may call it again.

    Args:
        settings: ``verbose_log`` adds the module, line, process id and thread of each message.
        process: Which process this is, as in ``hexllm_configure``; it stands in every line.
    """
    place = " %(name)s:%(lineno)d %(process)d/%(threadName)s" if settings.verbose_log else ""
    form = f"%(asctime)s %(levelname)s {process}{place}: %(message)s"
    logging.basicConfig(level=settings.log_level, format=form, force=True)
    if settings.log_level != "DEBUG":
        for name in CHATTY:
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
