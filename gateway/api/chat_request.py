"""What is particular to a chat: the prompt by the chat template, tools included, and how the answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...transfer.sampling_params import Grammar, SamplingParams
from .chat_messages import template_messages
from .chat_output import OutputFormat
from .errors import invalid, not_supported
from .openai_api import ChatRequest
from .parsed_request import ParsedRequest
from .reasoning import CLOSING, OPENING, Opened, opened_by_prompt
from .text import Tokenizer
from .tool_parsers import FORMATS, ToolParserName, format_of_template
from .tools import calling_of, functions_of, grammar_of, template_tools

TAIL_TOKENS = 32  # of a prompt: enough for a marker and the whitespace behind it


@dataclass(frozen=True)
class Chat:
    """The prompt's token ids, how to read the answer, and what it must match."""

    prompt: list[int]
    output: OutputFormat
    grammar: Grammar | None
    opening: int | None  # token ids of the markers around reasoning; None: the vocabulary has no such token
    closing: int | None

    def applied_to(self, parsed: ParsedRequest) -> ParsedRequest:
        """Raises ApiError 400 when the request's fields exclude each other."""
        params, grammar_field = parsed.params, parsed.grammar_field
        of_content = grammar_field.startswith("response_format")  # the guided_ fields are about all of the answer
        if self.grammar is not None and grammar_field and not of_content:
            raise invalid(f"{grammar_field} cannot be met by an answer that must call a tool.", grammar_field)
        if self.grammar is not None:  # an answer that is nothing but calls has no content to be of a format
            params = tuple(replace(one, grammar=self.grammar) for one in params)
            grammar_field = "tools"
        elif of_content and self.output.calling is not None:
            raise not_supported(grammar_field, "A required answer format beside tools that may be called")
        if grammar_field and self.output.reasoning is not None:
            params = tuple(self._behind_reasoning(one, grammar_field) for one in params)
        text = replace(parsed.text, markers=self._markers())
        return replace(parsed, params=params, text=text, output=self.output, grammar_field=grammar_field)

    def _behind_reasoning(self, params: SamplingParams, grammar_field: str) -> SamplingParams:
        """The grammar is about what follows the reasoning. Where that cannot be told apart by tokens there is none."""
        assert params.grammar is not None
        match self.output.reasoning:
            case "yes" if self.closing is None:
                raise not_supported(grammar_field, f"A required answer format where {CLOSING} is no single token")
            case "yes":
                return replace(params, grammar=replace(params.grammar, after=self.closing))
            case "maybe" if self.opening is not None and self.closing is not None:
                return replace(params, grammar=replace(params.grammar, after=self.closing, opening=self.opening))
            case _:
                return params

    def _markers(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text, or nobody would see what they mark."""
        reasoning = (OPENING, CLOSING) if self.output.reasoning else ()
        calling = self.output.calling
        form = FORMATS[calling.parser] if calling is not None and calling.mode == "auto" else None
        return (*reasoning, *(filter(None, (form.opening, form.closing)) if form else ()))


def parse_chat_request(
    request: ChatRequest, tokenizer: Tokenizer, *, add_special_tokens: bool = False, max_tokens: int | None = None
) -> Chat:
    """Raises ApiError 400 naming the field, also when the prompt is sure to have more than `max_tokens`."""
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other.", "continue_final_message")
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    functions = functions_of(request)
    calling = calling_of(request, functions, tool_parser(tokenizer))
    grammar = grammar_of(calling, functions) if calling else None
    # Under "none" the model is told of no tool: nobody would read its calls.
    tools = template_tools(functions) if calling else []
    prompt = tokenizer.encode_chat(
        template_messages(request.messages, tokenizer, tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=request.continue_final_message,
        tools=tools if tokenizer.template.tools else None,
        template_kwargs=_effort(request) | request.chat_template_kwargs,
        add_special_tokens=add_special_tokens,
        max_tokens=max_tokens,
    )
    reasoning = None
    if tokenizer.style.reasoning_parser == "think":
        reasoning = _opened(prompt, tokenizer, request.continue_final_message)
    opening, closing = tokenizer.token_id(OPENING), tokenizer.token_id(CLOSING)
    return Chat(prompt, OutputFormat(calling, reasoning), grammar, opening, closing)


def tool_parser(tokenizer: Tokenizer) -> ToolParserName:
    """Tools that we put into words ourselves are in Hermes style."""
    if tokenizer.style.tool_parser != "auto":
        return tokenizer.style.tool_parser
    return format_of_template(tokenizer.template_text) if tokenizer.template.tools else "hermes"


def _effort(request: ChatRequest) -> dict[str, Any]:
    """Variables by which templates know how much to reason."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _opened(prompt: list[int], tokenizer: Tokenizer, continued: bool) -> Opened:
    tail = prompt if continued else prompt[-TAIL_TOKENS:]
    return opened_by_prompt(tokenizer.decode(tail, skip_special_tokens=False), continued=continued)
