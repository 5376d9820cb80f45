"""Tool calls in OpenAI's JSON: `tool_calls`, and `function_call` for requests in the deprecated shape."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .chat_output import Call, Calling, new_call_id
from .tool_parsers import CallDelta


def whole_calls(calling: Calling, calls: Sequence[Call]) -> str:
    """The member of a message."""
    if calling.legacy:
        return f'"function_call":{_function(calls[0].name, calls[0].arguments)}'
    entries = [
        f'{{"id":"{new_call_id(calling.parser)}","type":"function","function":{_function(call.name, call.arguments)}}}'
        for call in calls
    ]
    return f'"tool_calls":[{",".join(entries)}]'


def _function(name: str, arguments: str) -> str:
    return f'{{"name":{json.dumps(name)},"arguments":{json.dumps(arguments)}}}'


class CallDeltas:
    """Members of the deltas of a stream: a call begins with its id, name and empty arguments, the arguments follow."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling

    def openings(self, calls: Sequence[CallDelta]) -> Iterator[str]:
        """One delta for every call that begins."""
        for call in calls:
            if not call.name:
                continue
            function = _function(call.name, "")
            if self._calling.legacy:
                yield f'"function_call":{function}'
            else:
                call_id = new_call_id(self._calling.parser)
                entry = f'{{"index":{call.index},"id":"{call_id}","type":"function","function":{function}}}'
                yield f'"tool_calls":[{entry}]'

    def arguments(self, calls: Sequence[CallDelta]) -> str:
        """What is new of the arguments, of all calls in one delta; "" for nothing."""
        new: dict[int, str] = defaultdict(str)
        for call in calls:
            new[call.index] += call.arguments
        texts = {index: json.dumps(arguments) for index, arguments in new.items() if arguments}
        if self._calling.legacy:
            return "".join(f'"function_call":{{"arguments":{text}}}' for text in texts.values())
        entries = [f'{{"index":{index},"function":{{"arguments":{text}}}}}' for index, text in texts.items()]
        return f'"tool_calls":[{",".join(entries)}]' if entries else ""
