"""Errors a user can act on: one line that says what is wrong, where, and what to do next."""

from __future__ import annotations


class ProctorError(Exception):
    """Base of every error that Proctor raises on purpose.

    Args:
        message: what was found and where; one line.
        code: stable identifier, `PR-Exxx`, for the documentation.
        hint: the next thing to do, usually a command.
    """

    code = "PR-E000"
    exit_code = 2

    def __init__(self, message: str, *, code: str | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.hint = hint

    def __str__(self) -> str:
        tail = f"  →  {self.hint}" if self.hint else ""
        return f"{self.code}  {self.message}{tail}"


class UsageError(ProctorError):
    """The command line cannot be carried out as written."""

    code = "PR-E100"


class TraceError(ProctorError):
    """A run directory is missing, unreadable or not one of ours."""

    code = "PR-E200"


class PackError(ProctorError):
    """A pack file is missing, malformed or newer than this Proctor."""

    code = "PR-E300"


class ConfigError(ProctorError):
    """A configuration file cannot be read, or says something that cannot be done."""

    code = "PR-E400"


class DeliveryError(ProctorError):
    """A receiver did not take a notice.

    Args:
        retry: whether another attempt can help; False when the receiver rejected what was sent.
        unsure: whether the receiver may have taken it nevertheless.
        retry_after_s: how long the receiver asked to be left alone.
    """

    code = "PR-E410"

    def __init__(
        self, message: str, *, retry: bool = True, unsure: bool = False, retry_after_s: float | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry, self.unsure, self.retry_after_s = retry, unsure, retry_after_s


class OutboxError(ProctorError):
    """The outbox cannot be read or written: its disk is full, it is locked, or it is not one of ours."""

    code = "PR-E420"


class TransportError(ProctorError):
    """A connection between a job and its verifier cannot be made, or not be trusted."""

    code = "PR-E500"


class OracleError(ProctorError):
    """A plan, a record directory or a comparison of the oracle cannot be carried out as written."""

    code = "PR-E600"


class MappingError(OracleError):
    """A layout cannot be applied to a tensor: it cuts a dimension that cannot be cut so, or combines addends in two ways."""

    code = "PR-E610"
