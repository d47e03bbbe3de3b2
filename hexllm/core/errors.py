"""One tree of errors, so that a caller can tell a user's mistake from a bug.

Every message says what is wrong, which value, who gave it, and what to do instead.
"""


class HexllmError(Exception):
    """Something a user can mend; shown as one sentence, without a traceback."""


class ConfigError(HexllmError):
    """A flag, environment variable or configuration file holds something that cannot be used."""


class PluginError(HexllmError):
    """A plugin, or the choice between plugins, is at fault."""


class CheckpointError(HexllmError):
    """A checkpoint is missing, truncated, or does not fit its model family."""


class UnsupportedConfigError(HexllmError):
    """A model's ``config.json`` asks for something its family does not implement."""


class PolicyError(HexllmError):
    """A scheduling policy gave an answer that the scheduler cannot act on."""


class RequestError(HexllmError):
    """A request holds something that cannot be honoured.

    Attributes:
        param: The name of the offending request field, or None when it is the body as a whole.
        status: The HTTP status to answer with (400 unless the contract says otherwise).
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class EngineDeadError(HexllmError):
    """The engine process is gone: every open request ends with this error."""
