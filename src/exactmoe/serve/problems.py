"""Refusals of a request, in OpenAI's form: a status, a message, the parameter, a code."""

from typing import Any

# Statuses after which OpenAI's clients try again by themselves, although it would not help.
_NOT_AGAIN = {504, 500}


class Problem(Exception):
    """A request that is refused or has failed.

    Attributes:
        status: of HTTP.
        param: the parameter of the request that is at fault, if one is.
        code: a word that programs can test.
        retry_after: seconds after which it may work.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}

    def headers(self) -> dict[str, str]:
        """Headers of the answer beside those of every answer."""
        made = {}
        if self.retry_after is not None:
            made["retry-after"] = str(self.retry_after)
        if self.status in _NOT_AGAIN:
            made["x-should-retry"] = "false"
        if self.status == 401:
            made["www-authenticate"] = "Bearer"
        return made


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> Problem:
    """A value of a request that is not allowed."""
    return Problem(400, message, param=param, code=code)
