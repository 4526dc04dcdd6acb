"""One tree of errors, and one table that says how each reaches a user.

A message says what is wrong, the value that was found and the limit or the expected value; ``hint``
says what to do about it. ``assert`` is for our own invariants only.
"""

from __future__ import annotations

from dataclasses import dataclass


class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose.

    Args:
        message: what is wrong, with the value found and the value expected.
        hint: what the user can do about it; one sentence.
        param: the request field or flag at fault, if one is.
        code: a machine-readable code that replaces the class's default one.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UserError(HeadraceError):
    """Something the user gave cannot be acted on."""


class ConfigError(UserError):
    """A flag, an environment variable or a configuration value is wrong."""


class RequestError(UserError):
    """A request is malformed or asks for something that is not supported."""


class ContextLengthError(RequestError):
    """A prompt, or a prompt and its answer, do not fit the context."""


class UnauthorizedError(RequestError):
    """The API key is missing or wrong."""


class ModelNotFoundError(UserError):
    """No model of this name is here or can be fetched."""


class UnsupportedModelError(UserError):
    """An architecture, a numeric format or a configuration key that Headrace does not implement."""


class CheckpointError(UserError):
    """A checkpoint is damaged or inconsistent."""


class MachineError(HeadraceError):
    """The machine cannot do what was asked."""


class DoesNotFitError(MachineError):
    """The model, or one allocation, does not fit the memory that is there."""


class DeviceLostError(MachineError):
    """A device stopped answering."""


class WorkerLostError(MachineError):
    """Threads that compute a part of a step died or hang; they can be replaced."""


class InternalError(HeadraceError):
    """A fault of Headrace's own."""


class EngineDeadError(InternalError):
    """The engine process has ended; requests cannot be served."""


class EngineStuckError(InternalError):
    """The engine process is there and has not said anything for too long."""


class EngineLoadingError(InternalError):
    """The engine is still loading the model."""


@dataclass(frozen=True)
class Outcome:
    """How an error reaches a user: process exit code, HTTP status and the bodies of both APIs."""

    exit_code: int
    http_status: int
    openai_type: str
    openai_code: str | None
    anthropic_type: str


# Most derived class first is not needed: the lookup walks the error's own class order.
OUTCOMES: dict[type[BaseException], Outcome] = {
    ContextLengthError: Outcome(
        2, 400, "invalid_request_error", "context_length_exceeded", "invalid_request_error"
    ),
    UnauthorizedError: Outcome(
        2, 401, "invalid_request_error", "invalid_api_key", "authentication_error"
    ),
    RequestError: Outcome(2, 400, "invalid_request_error", None, "invalid_request_error"),
    ModelNotFoundError: Outcome(
        2, 404, "invalid_request_error", "model_not_found", "not_found_error"
    ),
    UserError: Outcome(2, 400, "invalid_request_error", None, "invalid_request_error"),
    DoesNotFitError: Outcome(3, 503, "server_error", "out_of_memory", "overloaded_error"),
    MachineError: Outcome(3, 503, "server_error", None, "api_error"),
    EngineLoadingError: Outcome(4, 503, "server_error", "loading", "overloaded_error"),
    EngineStuckError: Outcome(4, 503, "server_error", "engine_stuck", "overloaded_error"),
    EngineDeadError: Outcome(4, 503, "server_error", "engine_dead", "api_error"),
    BaseException: Outcome(4, 500, "server_error", None, "api_error"),
}


def outcome_of(error: BaseException) -> Outcome:
    """Return how ``error`` is reported; any exception that is not ours is an internal error."""
    for cls in type(error).__mro__:
        if cls in OUTCOMES:
            return OUTCOMES[cls]
    return OUTCOMES[BaseException]
