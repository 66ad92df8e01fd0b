"""The bodies of requests: what is taken, in which bounds, and the refusal of all else.

A parameter that is not named here is refused, unless its value asks for nothing (NEUTRAL, or null):
a client that gets an answer got what it asked for.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from exactmoe.serve.problems import Problem, bad_request

# Parameter -> the values of it that ask for nothing more than this server gives.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
}

# Characters of a value that a refusal repeats.
_SHOWN = 80

_Stop = Annotated[str, StringConstraints(min_length=1)]


class _Body(BaseModel):
    """The description of a field is what its refusals name as allowed."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Body):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = Field(None, description="true or false")


class TextRequest(_Body):
    """What completions and chats have in common; None: the default."""

    model_config = ConfigDict(extra="allow")

    # The parameter that holds the prompt, and tokens of an answer when none are asked for; None:
    # as many as the limits leave.
    prompt_name: ClassVar[str]
    default_tokens: ClassVar[int | None]

    model: str = Field(description="the name that /v1/models gives")
    max_tokens: int | None = Field(None, ge=1, description="an integer from 1")
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0, at most 1")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="a 64-bit integer")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = Field(
        None, description="a text, or up to 4 texts, none of them empty"
    )
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="an object")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The parameter that bounds the answer, and its value; None: not given."""
        return "max_tokens", self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Likeliest tokens to name beside each token; None: no log-probability."""
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def require_supported(self) -> None:
        """Problem for a combination, or for a parameter that this server doesn't have."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is given without stream=true", "stream_options")
        for name, value in (self.model_extra or {}).items():
            if value is None or any(_same(value, neutral) for neutral in NEUTRAL.get(name, ())):
                continue
            allowed = [f"{name}={neutral!r}" for neutral in NEUTRAL.get(name, ())]
            raise bad_request(
                f"{name} is not supported by this server; allowed: "
                + " or ".join(["to leave it out", *allowed]),
                name,
                "unsupported_parameter",
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class CompletionRequest(TextRequest):
    """The body of /v1/completions."""

    prompt_name = "prompt"
    # OpenAI's default.
    default_tokens = 16

    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        description="a text or a list of token ids, or a list of one of these"
    )
    logprobs: int | None = Field(None, ge=0, le=5, description="an integer from 0 to 5")

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt; Problem for none or several."""
        if isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int)):
            if len(self.prompt) != 1:
                raise bad_request(
                    f"prompt has {len(self.prompt)} prompts; allowed: one a request", "prompt"
                )
            return self.prompt[0]  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]


class _TextPart(_Body):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a chat: text only."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"] = Field(description="system, user or assistant")
    content: str | Annotated[list[_TextPart], Field(min_length=1)] = Field(
        description="a text, or a list of parts {type: text, text: ...}"
    )

    def plain(self) -> dict[str, str]:
        """Role and content, as a chat template takes them."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(TextRequest):
    """The body of /v1/chat/completions."""

    prompt_name = "messages"
    default_tokens = None

    messages: list[Message] = Field(min_length=1, description="a list of messages, at least one")
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer from 1")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="an integer from 0 to 20")

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        if self.max_tokens is not None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def require_supported(self) -> None:
        super().require_supported()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request(
                "max_tokens and max_completion_tokens are both given; allowed: one of them",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs is given without logprobs=true", "top_logprobs")


Body = TypeVar("Body", bound=TextRequest)


def parse(kind: type[Body], body: bytes) -> Body:
    """The request in a body; Problem names the first parameter that is not as it must be."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _problem(kind, error) from None
    request.require_supported()
    return request


def _problem(kind: type[_Body], error: ValidationError) -> Problem:
    first = error.errors(include_url=False, include_context=False)[0]
    param, allowed = _parameter(kind, first["loc"])
    if param is None:
        return bad_request(f"the body is no JSON object: {first['msg']}", None, "invalid_json")
    if first["type"] == "missing":
        return bad_request(f"{param} is missing", param, "missing_parameter")
    if first["type"] == "extra_forbidden":
        message = f"{param} is not supported by this server; allowed: to leave it out"
        return bad_request(message, param, "unsupported_parameter")
    told = repr(first["input"])
    shown = told if len(told) <= _SHOWN else told[: _SHOWN - 3] + "..."
    return bad_request(f"{param} is {shown}; allowed: {allowed}", param)


def _parameter(kind: type[_Body], place: tuple[int | str, ...]) -> tuple[str | None, str | None]:
    """A place in pydantic's words -> the parameter's name, and what is allowed for it.

    Of a union each member is told with a step of its own: such steps are left out.
    """
    param, allowed, fields = "", None, kind.model_fields
    for step in place:
        if isinstance(step, int):
            if param != "messages":
                break
            param, fields = f"{param}[{step}]", Message.model_fields
        elif step in fields:
            param, allowed = f"{param}.{step}".lstrip("."), fields[step].description
            fields = StreamOptions.model_fields if step == "stream_options" else {}
        elif fields:
            return f"{param}.{step}".lstrip("."), None
    return param or None, allowed
