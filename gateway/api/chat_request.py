"""What is particular to a chat: the prompt by the chat template, tools included, and how the answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...transfer.sampling_params import Grammar
from .chat_messages import template_messages
from .chat_output import OutputFormat
from .errors import ApiError, invalid, not_supported
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

    def applied_to(self, parsed: ParsedRequest) -> ParsedRequest:
        """Raises ApiError 400 when the request's fields exclude each other."""
        params = parsed.params
        if self.grammar is not None:
            params = tuple(replace(one, grammar=self.grammar) for one in params)
        grammar = params[0].grammar
        if grammar is not None and self.grammar is None and self.output.calling is not None:
            raise not_supported("response_format", "A required answer format beside tools that may be called")
        if grammar is not None and self.output.reasoning == "yes":
            raise self._grammar_and_reasoning()
        text = replace(parsed.text, markers=self._markers())
        return replace(parsed, params=params, text=text, output=self.output)

    def _markers(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text, or nobody would see what they mark."""
        reasoning = (OPENING, CLOSING) if self.output.reasoning else ()
        calling = self.output.calling
        form = FORMATS[calling.parser] if calling is not None and calling.mode == "auto" else None
        return (*reasoning, *(filter(None, (form.opening, form.closing)) if form else ()))

    def _grammar_and_reasoning(self) -> ApiError:
        what = "A required answer format (or call) while the model reasons"
        return not_supported("tool_choice" if self.grammar is not None else "response_format", what)


def parse_chat_request(request: ChatRequest, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> Chat:
    """Raises ApiError 400 naming the field."""
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other.", "continue_final_message")
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    functions = functions_of(request)
    calling = calling_of(request, functions, tool_parser(tokenizer))
    # Under "none" the model is told of no tool: nobody would read its calls.
    tools = template_tools(functions) if calling else []
    prompt = tokenizer.encode_chat(
        template_messages(request.messages, tokenizer, tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=request.continue_final_message,
        tools=tools if tokenizer.template.tools else None,
        template_kwargs=_effort(request) | request.chat_template_kwargs,
        add_special_tokens=add_special_tokens,
    )
    reasoning = None
    if tokenizer.style.reasoning_parser == "think":
        reasoning = _opened(prompt, tokenizer, request.continue_final_message)
    return Chat(prompt, OutputFormat(calling, reasoning), grammar_of(calling, functions) if calling else None)


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
