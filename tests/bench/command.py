"""`pdserve bench` as a user runs it: a process of its own."""

from __future__ import annotations

import asyncio
import sys


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.bench", *arguments, stdout=pipe, stderr=pipe
    )


async def bench(*arguments: str, timeout_s: float = 60) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr."""
    process = await start(*arguments)
    out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    assert process.returncode is not None
    return process.returncode, out.decode().splitlines(), err.decode()
