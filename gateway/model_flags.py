"""Flags that say which models are served, and under which names: those of the gateway and of `pdserve up`.

A flag that may differ from model to model is given as `VALUE`, for all models, or as `NAME=VALUE`, for one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from pydantic import TypeAdapter

from ..engine.checkpoint import served_name
from ..transfer.errors import ConfigError
from .aliases import Alias, BadWeights, check_weights
from .api.chat_output import ChatStyle, ToolParserChoice
from .api.reasoning import ReasoningParserName

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSource:
    """One model to serve: its name in the API, and where it comes from (see `engine.checkpoint.resolve`)."""

    name: str
    source: str


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", required=True, metavar="[NAME=]M",
        help="directory, .gguf file, hub id, or `demo`; given again with names, several models are served",
    )  # fmt: skip
    parser.add_argument("--served-model-name", help="name in the API (default: the directory's name, or `demo`)")
    parser.add_argument(
        "--alias", action="append", default=[], metavar="NAME=MODEL[:WEIGHT],…",
        help="one more name for a model, or for several that share its users by weight",
    )  # fmt: skip


def add_per_model(parser: argparse._ActionsContainer, flag: str, value: str, help: str) -> None:
    """A flag that may be given once for all models, and once for each; read what was given with `per_model`."""
    parser.add_argument(flag, action="append", default=[], metavar=f"[NAME=]{value}", help=help)


def add_style_arguments(parser: argparse._ActionsContainer) -> None:
    tools, reasoning = (", ".join(get_args(choice)) for choice in (ToolParserChoice, ReasoningParserName))
    add_per_model(parser, "--tool-call-parser", "NAME", f"how the model writes calls of functions: {tools}")
    add_per_model(parser, "--reasoning-parser", "NAME", f"how it marks its reasoning, to be told apart: {reasoning}")


def tool_parser_named(text: str) -> ToolParserChoice:
    """Raises ValueError."""
    return TypeAdapter[ToolParserChoice](ToolParserChoice).validate_python(text)


def reasoning_parser_named(text: str) -> ReasoningParserName:
    """Raises ValueError."""
    return TypeAdapter[ReasoningParserName](ReasoningParserName).validate_python(text)


def chat_styles(args: argparse.Namespace, models: Sequence[ModelSource]) -> Mapping[str, ChatStyle]:
    """Raises ConfigError."""
    tools = per_model("--tool-call-parser", args.tool_call_parser, models, tool_parser_named)
    reasoning = per_model("--reasoning-parser", args.reasoning_parser, models, reasoning_parser_named)
    return {
        model.name: ChatStyle(tools.get(model.name, "auto"), reasoning.get(model.name, "none")) for model in models
    }


def models_of(args: argparse.Namespace) -> tuple[ModelSource, ...]:
    """What --model and --served-model-name say. Raises ConfigError."""
    models = []
    for given in args.model:
        name, source = _split(given)
        if name and args.served_model_name:
            raise ConfigError(f"--served-model-name and the name in --model {given} exclude each other")
        models.append(ModelSource(name or args.served_model_name or served_name(source), source))
    names = [model.name for model in models]
    if args.served_model_name and len(models) > 1:
        raise ConfigError("--served-model-name names one model; give each of several as --model NAME=M")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--model: the name {min(twice)} is given twice; set another one with --model NAME=M")
    return tuple(models)


def _split(given: str) -> tuple[str, str]:
    """`NAME=M` in two; the name is empty when `given` is a path, which may hold a `=` itself."""
    name, equals, source = given.partition("=")
    is_path = os.path.exists(os.path.expanduser(given)) or given.startswith(("/", "~", "."))
    return (name, source) if equals and not is_path else ("", given)


def aliases_of(args: argparse.Namespace, models: Sequence[ModelSource]) -> tuple[Alias, ...]:
    """What --alias says, given the models. Raises ConfigError."""
    sources = {model.name: model for model in models}
    aliases: dict[str, Alias] = {}
    for given in args.alias:
        name, _, targets = given.partition("=")
        if not name or name in sources or name in aliases:
            raise ConfigError(f"--alias {given}: it must be a name of its own, then = and models")
        weights: dict[str, int] = {}
        for target in targets.split(","):
            model, colon, weight = target.rpartition(":")
            if target in sources or not (colon and weight.isdecimal()):
                model, weight = target, "1"
            if model in weights:
                raise ConfigError(f"--alias {given}: {model} is there twice")
            weights[model] = int(weight)
        try:
            aliases[name] = Alias(name, check_weights(weights, sources))
        except BadWeights as error:
            raise ConfigError(f"--alias {given}: {error}") from None
    return tuple(aliases.values())


def per_model(
    flag: str, given: Sequence[str], models: Sequence[ModelSource], read: Callable[[str], T]
) -> Mapping[str, T]:
    """Model → the value of a flag, for those models that it says something of. Raises ConfigError."""
    names = {model.name for model in models}
    for_all: dict[str, T] = {}
    for_one: dict[str, T] = {}
    for text in given:
        name = max((name for name in names if text.startswith(f"{name}=")), key=len, default=None)
        try:
            if name is None:
                for_all = dict.fromkeys(names, read(text))
            else:
                for_one[name] = read(text[len(name) + 1 :])
        except ValueError:
            known = f"; models: {', '.join(sorted(names))}" if "=" in text and name is None else ""
            raise ConfigError(f"{flag} {text} makes no sense{known}") from None
    return for_all | for_one
