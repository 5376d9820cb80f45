"""The supervisor, over tiny real processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pdserve.gateway.supervisor import Backoff, ChildSpec, Supervisor, write_json, write_text
from pdserve.transfer.errors import ConfigError, RegistrationRefused

FAST = Backoff(first_s=0.05, longest_s=0.2, reset_after_s=60.0)
BRIEF = "import sys, time; print(time.monotonic()); sys.exit(1)"
FOREVER = "import signal; signal.pause()"


def python(name: str, code: str, *arguments: object, env: dict[str, str] | None = None) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-S", "-c", code, *map(str, arguments)), env or {})


def running(pid: int) -> bool:
    """False also for a zombie: an orphan stays one for as long as the first process of the system likes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Lines:
    """What the children wrote, and an event for every line."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self._arrived = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.all.append((name, line))
        self._arrived.set()

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.all if who == name]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()


async def at_once() -> None:
    return None


async def never() -> None:
    await asyncio.Event().wait()


def supervise(
    lines: Lines, *specs: ChildSpec, until_ready: Callable[[], Awaitable[None]] = at_once, stop_grace_s: float = 10.0
) -> tuple[Supervisor, asyncio.Task[None], asyncio.Event]:
    supervisor = Supervisor(specs, backoff=FAST, write=lines, stop_grace_s=stop_grace_s)
    ready = asyncio.Event()
    return supervisor, asyncio.create_task(supervisor.run(until_ready, ready.set)), ready


async def test_a_child_that_dies_is_started_again_and_its_sibling_is_not() -> None:
    lines = Lines()
    supervisor, run, ready = supervise(
        lines,
        python("mortal", "import os; print(os.getpid(), flush=True); " + FOREVER),
        python("sibling", "import os; print(os.getpid(), flush=True); " + FOREVER),
    )
    await asyncio.wait_for(ready.wait(), 10)
    await lines.until(lambda: len(lines.all) == 2)
    os.kill(supervisor.pids["mortal"], signal.SIGKILL)
    await lines.until(lambda: len(lines.of("mortal")) == 2)
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)
    assert len(set(lines.of("mortal"))) == 2
    assert len(lines.of("sibling")) == 1
    assert not any(running(int(pid)) for _, pid in lines.all)


def test_the_pause_doubles_up_to_its_limit_and_a_long_life_resets_it() -> None:
    backoff = Backoff()
    pauses, pause_s = [], 0.0
    for _ in range(7):
        pause_s = backoff.next_pause_s(pause_s, lived_s=0.5)
        pauses.append(pause_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert backoff.next_pause_s(30.0, lived_s=59.9) == 30
    assert backoff.next_pause_s(30.0, lived_s=60.0) == 1


async def test_a_child_that_keeps_dying_is_started_again_ever_more_slowly() -> None:
    lines = Lines()
    supervisor, run, _ = supervise(lines, python("brief", BRIEF), until_ready=never)
    await lines.until(lambda: len(lines.of("brief")) == 4)
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)
    starts = [float(line) for line in lines.of("brief")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert all(gap >= pause_s for gap, pause_s in zip(gaps, (0.05, 0.1, 0.2), strict=True))


async def test_a_child_that_leaves_with_code_0_is_not_started_again_and_the_others_go_on() -> None:
    lines = Lines()
    supervisor, run, ready = supervise(
        lines,
        python("drained", "print('once', flush=True)"),
        python("mortal", "print('again', flush=True); raise SystemExit(1)"),
    )
    await asyncio.wait_for(ready.wait(), 10)
    await lines.until(lambda: len(lines.of("mortal")) == 4)
    assert lines.of("drained") == ["once"]
    assert not run.done()
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)


async def test_a_set_whose_last_child_has_left_is_over() -> None:
    _, run, _ = supervise(Lines(), python("one", "pass"), python("two", "pass"), until_ready=never)
    await asyncio.wait_for(run, 15)


@pytest.mark.parametrize(
    ("code", "word", "error"), [(2, "error", ConfigError), (3, "refused", RegistrationRefused)], ids=["2", "3"]
)
async def test_a_child_that_cannot_work_before_the_set_was_ready_ends_everything_with_its_own_words(
    code: int, word: str, error: type[Exception]
) -> None:
    lines = Lines()
    give_up = f"import sys; print('pdserve.decode: {word}: no such thing', file=sys.stderr); sys.exit({code})"
    supervisor, run, ready = supervise(
        lines,
        python("other", "print('up', flush=True); " + FOREVER),
        python("decode-0", give_up),
        until_ready=never,
    )
    with pytest.raises(error, match=r"^decode-0: no such thing$"):
        await asyncio.wait_for(run, 15)
    assert not ready.is_set()
    assert supervisor.pids == {}
    assert lines.of("decode-0") == []  # the one line is the exception's to show


async def test_once_ready_a_child_that_cannot_work_is_shown_and_started_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    code = (
        "import os, sys, signal\n"
        "if os.path.exists(sys.argv[1]):\n"
        "    print('pdserve.decode: error: the file is broken', file=sys.stderr); sys.exit(2)\n"
        "print('up', flush=True); signal.pause()"
    )
    lines = Lines()
    supervisor, run, ready = supervise(lines, python("decode-0", code, broken))
    await asyncio.wait_for(ready.wait(), 10)
    await lines.until(lambda: len(lines.all) == 1)
    broken.touch()
    os.kill(supervisor.pids["decode-0"], signal.SIGKILL)
    await lines.until(lambda: "pdserve.decode: error: the file is broken" in lines.of("decode-0"))
    broken.unlink()
    await lines.until(lambda: lines.of("decode-0").count("up") == 2)
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)


async def test_a_child_that_ignores_the_signal_is_killed_after_the_grace() -> None:
    lines = Lines()
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
    supervisor, run, _ = supervise(lines, python("deaf", deaf + FOREVER), stop_grace_s=0.3)
    await lines.until(lambda: lines.of("deaf") == ["deaf"])
    pid = supervisor.pids["deaf"]
    supervisor.request_stop()
    await asyncio.wait_for(run, 10)
    assert not running(pid)


async def test_a_second_request_to_stop_does_not_wait_for_the_grace() -> None:
    lines = Lines()
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
    supervisor, run, _ = supervise(lines, python("deaf", deaf + FOREVER), stop_grace_s=60.0)
    await lines.until(lambda: lines.of("deaf") == ["deaf"])
    supervisor.request_stop()
    supervisor.request_stop()
    await asyncio.wait_for(run, 10)
    assert supervisor.pids == {}


async def test_a_helper_left_by_a_dead_child_neither_hides_the_death_nor_outlives_it() -> None:
    lines = Lines()
    code = (
        "import subprocess, sys, os\n"
        "helper = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        "print(helper.pid, flush=True); os._exit(1)"
    )
    supervisor, run, _ = supervise(lines, python("parent", code))
    await lines.until(lambda: len(lines.of("parent")) == 2)
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)
    async with asyncio.timeout(10):  # SIGKILL takes effect in its own time
        while any(running(int(pid)) for pid in lines.of("parent")):
            await asyncio.sleep(0.01)


async def test_an_error_of_the_readiness_check_stops_the_children() -> None:
    async def fail() -> None:
        raise ConfigError("the gateway speaks another language")

    supervisor, run, _ = supervise(Lines(), python("child", FOREVER), until_ready=fail)
    with pytest.raises(ConfigError, match="another language"):
        await asyncio.wait_for(run, 15)
    assert supervisor.pids == {}


async def test_a_command_that_cannot_be_run_stops_the_others() -> None:
    missing = ChildSpec("missing", ("/nonexistent/program",))
    supervisor, run, _ = supervise(Lines(), python("child", FOREVER), missing, until_ready=never)
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(run, 15)
    assert supervisor.pids == {}


async def test_children_get_their_environment_on_top_of_ours_and_a_group_of_their_own() -> None:
    lines = Lines()
    code = "import os; print(os.environ['EXTRA'], 'PATH' in os.environ, os.getpgid(0) == os.getpid(), flush=True); "
    supervisor, run, _ = supervise(lines, python("child", code + FOREVER, env={"EXTRA": "yes"}))
    await lines.until(lambda: bool(lines.all))
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)
    assert lines.of("child") == ["yes True True"]


async def test_a_line_longer_than_the_limit_does_not_stop_the_output_that_follows() -> None:
    lines = Lines()
    code = "print('x' * 5_000_000); print('after', flush=True); "
    supervisor, run, _ = supervise(lines, python("child", code + FOREVER))
    await lines.until(lambda: "after" in lines.of("child"))
    supervisor.request_stop()
    await asyncio.wait_for(run, 15)
    assert max(len(line) for line in lines.of("child")) < 1_000_000


def test_text_lines_bear_the_name_and_json_lines_stay_json(capsys: pytest.CaptureFixture[str]) -> None:
    write_text("decode-0", "hello")
    write_json("decode-0", '{"level": "info", "message": "a \\"quote\\""}')
    write_json("decode-0", "Traceback: {oops}")
    write_json("decode-0", "{not json")
    text, *rest = capsys.readouterr().err.splitlines()
    assert text == "[decode-0] hello"
    assert [json.loads(line) for line in rest] == [
        {"process": "decode-0", "level": "info", "message": 'a "quote"'},
        {"process": "decode-0", "message": "Traceback: {oops}"},
        {"process": "decode-0", "message": "{not json"},
    ]
