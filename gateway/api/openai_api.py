"""The request bodies of /v1/completions and /v1/chat/completions: every field that is read, with its type and range.

Fields that are not listed are accepted and ignored, since clients send vendor extras. Null means "not given" for
every optional field. Fields under `NotYet` belong to the API but are refused, by `parsing.py`, unless their value
asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Strict, StringConstraints, Tag
from pydantic.config import JsonDict, JsonValue
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema

from ...transfer.sampling_params import MAX_LOGPROBS
from .structured import StructuredFields

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024  # bounds what is held back, and searched, per token
MAX_TOKEN_LIST = 1024  # entries of logit_bias and of stop_token_ids
MAX_TOOLS = 1024
INT32 = 1 << 31
INT64 = 1 << 63

TAG = "|"  # begins the tags of unions, which `parsing.py` strips from the path of an error


def _integral(value: object) -> object:
    """JSON has one kind of number: 16.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Flag = Annotated[bool, Strict()]
Int = Annotated[int, Strict(), BeforeValidator(_integral)]
Num = Annotated[float, Strict(), Field(allow_inf_nan=False)]
TokenIds = list[Annotated[int, Strict(), WithJsonSchema({"type": "integer", "minimum": 0})]]
Penalty = Annotated[Num, Field(ge=-2, le=2)]
NotYet = SkipJsonSchema[Any]  # not looked at beyond "is it there", and not in the API's description

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


def _kind_of_list(value: object) -> str:
    return f"{TAG}list" if isinstance(value, list) else f"{TAG}str"


Stop = Annotated[
    Annotated[StopString, Tag(f"{TAG}str")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag(f"{TAG}list")],
    Discriminator(_kind_of_list),
]


class StreamOptions(BaseModel):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None


class CommonRequest(StructuredFields):
    """What both endpoints share. The second half are extensions that serving engines agree on."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    temperature: Annotated[Num, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Num, Field(ge=0, le=1)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Annotated[Num, Field(ge=-100, le=100)]], Field(max_length=MAX_TOKEN_LIST)] = Field(
        default_factory=dict
    )
    seed: Annotated[Int, Field(ge=-INT64, le=INT64 - 1)] | None = None
    stop: Stop | None = None
    echo: Flag = False

    top_k: Annotated[Int, Field(ge=-1)] = 0
    min_p: Annotated[Num, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Num, Field(gt=0, le=1e4)] = 1.0
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    ignore_eos: Flag = False
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_TOKEN_LIST)] = Field(default_factory=list)
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    return_token_ids: Flag = False
    priority: Annotated[Int, Field(ge=-INT32, lt=INT32)] = 0
    cache_salt: Annotated[str, StringConstraints(max_length=256)] = ""

    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    use_beam_search: NotYet = None


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return f"{TAG}text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return f"{TAG}token_lists"
    return f"{TAG}tokens" if isinstance(first, (int, float)) and not isinstance(first, bool) else f"{TAG}texts"


Prompt = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag(f"{TAG}texts")]
    | Annotated[TokenIds, Tag(f"{TAG}tokens")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag(f"{TAG}token_lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(CommonRequest):
    prompt: Prompt
    best_of: Annotated[Int, Field(ge=0, le=20)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=5)] | None = None
    suffix: NotYet = None


class ContentPart(BaseModel):
    """One part of a message's content; which members it needs depends on `type`, see `chat_messages.py`."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": [kind]}
                for kind in ("text", "refusal")
            ]
        }
    )

    type: str
    text: str | None = None
    refusal: str | None = None


Content = Annotated[
    Annotated[str, Tag(f"{TAG}str")] | Annotated[list[ContentPart], Field(min_length=1), Tag(f"{TAG}list")],
    Discriminator(_kind_of_list),
]


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class ToolFunction(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedToolSet(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


def _kind_of_choice(value: object) -> str:
    if not isinstance(value, dict):
        return f"{TAG}mode"
    return f"{TAG}allowed" if value.get("type") == "allowed_tools" else f"{TAG}named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(f"{TAG}mode")]
    | Annotated[NamedTool, Tag(f"{TAG}named")]
    | Annotated[AllowedTools, Tag(f"{TAG}allowed")],
    Discriminator(_kind_of_choice),
]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag(f"{TAG}mode")] | Annotated[NamedFunction, Tag(f"{TAG}named")],
    Discriminator(_kind_of_choice),
]


def _needs(roles: tuple[str, ...], **types: list[JsonValue]) -> JsonDict:
    """Of the JSON schema: a message of one of these roles with these members, which are of these types."""
    of_types: dict[str, JsonValue] = {name: {"type": kinds} for name, kinds in types.items()}
    return {"properties": {"role": {"enum": [*roles]}, **of_types}, "required": [*types]}


class ChatMessage(BaseModel):
    """One message; which members it needs depends on `role`, see `chat_messages.py`."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                _needs(("developer", "system", "user", "assistant"), content=["string", "array"]),
                _needs(("tool",), content=["string", "array"], tool_call_id=["string"]),
                _needs(("function",), name=["string"]),
                _needs(("assistant",), refusal=["string"]),
                _needs(("assistant",), tool_calls=["array"]),
                _needs(("assistant",), function_call=["object"]),
            ]
        }
    )

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatRequest(CommonRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Int, Field(ge=0)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    functions: Annotated[list[ToolFunction], Field(max_length=MAX_TOOLS)] | None = None
    function_call: FunctionChoice | None = None

    reasoning_effort: Annotated[str, StringConstraints(max_length=64)] | None = None  # shown to the chat template

    # Accepted, and without a meaning here.
    verbosity: Literal["low", "medium", "high"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: Flag | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    modalities: NotYet = None
    audio: NotYet = None
