from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.traces import TraceRequest, read_trace

# Where data lies that is not part of this repository: the public traces among them.
SHARED = Path(os.environ.get("PDSERVE_SHARED") or Path(__file__).parents[3] / "shared")
PUBLIC_TRACES = SHARED / "traces"
needs_public_traces = pytest.mark.skipif(
    not PUBLIC_TRACES.is_dir(),
    reason=f"{PUBLIC_TRACES} is absent; set PDSERVE_SHARED to the directory that holds traces/",
)

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,374,44
2023-11-16 18:15:48.0000000,396,109
2023-11-16 18:16:46.5000000,879,55
"""
MOONCAKE = """\
{"timestamp": 3000, "input_length": 30, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 40, "output_length": 6, "hash_ids": [0, 2, 3]}

{"timestamp": 6500, "input_length": 7, "output_length": 7, "hash_ids": [4]}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(text.encode())
    return path


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, AZURE)) == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(1.5, 396, 109),
        TraceRequest(60.0, 879, 55),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace("0000000,", "0000000+00:00,"),
        lambda text: text.replace(",", ", "),
    ],
    ids=["crlf", "byte order mark", "utc offset", "spaces"],
)
def test_azure_variants_read_the_same(tmp_path: Path, change: object) -> None:
    assert callable(change)
    assert [r.at_s for r in read_trace(written(tmp_path, change(AZURE)))] == [0.0, 1.5, 60.0]


def test_mooncake_keeps_hash_ids_and_counts_milliseconds(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE)) == [
        TraceRequest(0.0, 30, 5, (0, 1)),
        TraceRequest(0.0, 40, 6, (0, 2, 3)),
        TraceRequest(3.5, 7, 7, (4,)),
    ]


def test_requests_come_in_order_of_time(tmp_path: Path) -> None:
    lines = AZURE.splitlines(keepends=True)
    shuffled = "".join([lines[0], lines[3], lines[1], lines[2]])
    assert [r.input_tokens for r in read_trace(written(tmp_path, shuffled))] == [374, 396, 879]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (AZURE + "2023-11-16 18:16:47.0000000,12\n", 5),
        (AZURE + "2023-11-16 18:16:47.0000000,twelve,3\n", 5),
        (AZURE + "2023-11-16 18:16:47.0000000,-12,3\n", 5),
        (AZURE + "yesterday,12,3\n", 5),
        (MOONCAKE + "{\n", 5),
        (MOONCAKE + "[1]\n", 5),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', 5),
        (MOONCAKE + '{"timestamp": -1, "input_length": 5, "output_length": 1}\n', 5),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 5, "output_length": 1}\n', 5),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5.5, "output_length": 1}\n', 5),
        (MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 1}\n', 5),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n', 5),
        ("\n" + AZURE.replace("ContextTokens", "Context"), 2),
        ("[" * 100_000, 1),
        ("{" + '"a":[' * 100_000, 1),
    ],
)
def test_a_malformed_line_is_one_error_naming_it(tmp_path: Path, text: str, line: int) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BenchError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(error.value)


def test_an_empty_or_missing_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no requests"):
        read_trace(written(tmp_path, AZURE.splitlines()[0]))
    with pytest.raises(BenchError, match="no requests"):
        read_trace(written(tmp_path, "\n"))
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match="UTF-8"):
        read_trace(tmp_path / "binary")


@needs_public_traces
@pytest.mark.parametrize(("name", "num_requests"), [("code", 8819), ("conv", 19366)])
def test_the_public_azure_traces_read_whole(name: str, num_requests: int) -> None:
    requests = read_trace(PUBLIC_TRACES / f"azure_llm_2023_{name}.csv")
    assert len(requests) == num_requests
    assert requests[0].at_s == 0
    assert 3400 < requests[-1].at_s < 3600  # an hour of production
    assert all(request.input_tokens > 0 and request.output_tokens > 0 for request in requests)


@needs_public_traces
def test_the_public_mooncake_trace_has_a_hash_id_per_block_of_16() -> None:
    requests = read_trace(PUBLIC_TRACES / "mooncake_conversation_div32_first600s.jsonl")
    assert len(requests) == 1750
    assert all(len(request.hash_ids) == math.ceil(request.input_tokens / 16) for request in requests)
