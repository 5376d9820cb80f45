"""GGUF files are converted once, whatever starts together, dies or is damaged."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdserve.engine.checkpoint import DEMO_INSTALL, DEMO_PACKAGE, demo_gguf, resolve
from pdserve.engine.gguf_cache import cache_directory, converted
from pdserve.transfer.errors import CheckpointError

demo_installed = pytest.mark.skipif(find_spec(DEMO_PACKAGE) is None, reason=f"needs `{DEMO_INSTALL}`")


def refusal(gguf: Path) -> str:
    """The one line with which `gguf` is refused."""
    with pytest.raises(CheckpointError) as caught:
        converted(gguf)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_python(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


CONVERT = """
import sys
from pathlib import Path
from pdserve.engine.gguf_cache import converted
from pdserve.transfer.errors import CheckpointError
try:
    print(converted(Path(sys.argv[1])))
except CheckpointError as error:
    print("refused:", error)
"""


def test_corrupt_gguf_is_refused_in_one_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    for content in (b"GGUF", b"GGUF" + b"\xff" * 500, b"GGUF" + bytes(500)):
        (tmp_path / "bad.gguf").write_bytes(content)
        assert str(tmp_path / "bad.gguf") in refusal(tmp_path / "bad.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"PK\x03\x04")
    assert "bad.gguf is not a GGUF file" in refusal(tmp_path / "bad.gguf")
    assert [path for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


@demo_installed
def test_truncated_gguf_is_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    """Cut behind the metadata, in the middle of the weights."""
    with demo_gguf().open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(30 << 20))
    assert "corrupt or truncated" in refusal(tmp_path / "cut.gguf")


# Stands for the real converter, which needs torch and half a minute: writes a model in pieces, logs each conversion.
FAKE_CONVERSION = """
import os, shutil, signal, sys, time, types

source, log, mode = sys.argv[2:5]

def convert(gguf, directory):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    shutil.copy(source + "/config.json", directory)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # long enough for the others to arrive at the lock
    if mode == "wrong":
        return
    for name in ("tokenizer.json", "model.safetensors"):
        shutil.copy(f"{source}/{name}", directory)

module = types.ModuleType("pdserve.engine.gguf_conversion")
module.convert = convert
sys.modules["pdserve.engine.gguf_conversion"] = module
"""


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "some model.gguf").write_bytes(b"GGUF and more")
    return tmp_path / "some model.gguf"


def fake_arguments(gguf: Path, model: Path, mode: str) -> list[str]:
    return [str(gguf), str(model), str(gguf.parent / "log"), mode]


def test_processes_starting_together_convert_once(gguf: Path, model: Path, cache: Path) -> None:
    command = [sys.executable, "-c", FAKE_CONVERSION + CONVERT, *fake_arguments(gguf, model, "good")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [process.communicate(timeout=60)[0].strip() for process in started]
    assert len(set(answers)) == 1
    assert Path(answers[0]).parent == cache / "models"
    assert (Path(answers[0]) / "model.safetensors").is_file()
    assert len((gguf.parent / "log").read_text().split()) == 1


def test_killed_conversion_does_no_harm_to_the_next(gguf: Path, model: Path, cache: Path) -> None:
    killed = run_python(FAKE_CONVERSION + CONVERT, *fake_arguments(gguf, model, "killed"))
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in cache.glob("models/.partial-*")] != []
    again = run_python(FAKE_CONVERSION + CONVERT, *fake_arguments(gguf, model, "good"))
    assert Path(again.stdout.strip()).is_dir(), again.stderr
    assert list(cache.glob("models/.partial-*")) == []


def test_incomplete_conversion_is_refused_and_never_bears_the_final_name(gguf: Path, model: Path, cache: Path) -> None:
    done = run_python(FAKE_CONVERSION + CONVERT, *fake_arguments(gguf, model, "wrong"))
    assert done.stdout.startswith("refused:")
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_damaged_conversion_is_made_again(gguf: Path, model: Path, cache: Path) -> None:
    arguments = fake_arguments(gguf, model, "good")
    directory = Path(run_python(FAKE_CONVERSION + CONVERT, *arguments).stdout.strip())
    os.truncate(directory / "model.safetensors", 1000)
    assert run_python(FAKE_CONVERSION + CONVERT, *arguments).stdout.strip() == str(directory)
    assert converted(gguf) == directory
    assert len((gguf.parent / "log").read_text().split()) == 2


def test_other_content_under_the_same_name_is_converted_anew(gguf: Path, model: Path, cache: Path) -> None:
    arguments = fake_arguments(gguf, model, "good")
    first = run_python(FAKE_CONVERSION + CONVERT, *arguments).stdout
    gguf.write_bytes(b"GGUF and something else")
    assert run_python(FAKE_CONVERSION + CONVERT, *arguments).stdout != first


def test_cache_that_cannot_be_written_is_refused_in_one_line(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(gguf))  # a file where a directory should be
    assert "cannot write" in refusal(gguf)


def test_cache_follows_its_own_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("PDSERVE_CACHE", "/own")
    assert cache_directory() == Path("/own")
    monkeypatch.delenv("PDSERVE_CACHE")
    assert cache_directory() == Path("/xdg/pdserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path("/home/me/.cache/pdserve")


@demo_installed
def test_demo_package_is_found_without_importing_it() -> None:
    assert demo_gguf().read_bytes()[:4] == b"GGUF"
    assert DEMO_PACKAGE not in sys.modules


@demo_installed
@pytest.mark.timeout(400)
def test_converted_demo_equals_the_gguf_in_tokens_and_greedy_text() -> None:
    """The directory pdserve serves and the GGUF itself as transformers loads it: one tokenizer, one model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    directory, gguf = resolve("demo"), demo_gguf()
    origin = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer, reference = AutoTokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(**origin)
    texts = ["", " Hello,  world!\n\n\tx = 3.14", "Grüße 안녕 👩‍👩‍👧 <|im_start|>user\nHi<|im_end|>", "a" * 300]
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    for text in texts:
        assert tokenizer(text).input_ids == reference(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == reference.decode(reference(text).input_ids)
    assert tokenizer.chat_template == reference.chat_template
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (reference.eos_token_id, reference.bos_token_id)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(
        **origin, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert model.generation_config.eos_token_id == original.generation_config.eos_token_id == tokenizer.eos_token_id
    tensors = original.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    ours, theirs = (one.generate(**prompt, max_new_tokens=16, do_sample=False) for one in (model, original))
    assert ours.tolist() == theirs.tolist()
    assert ours.shape[1] > prompt["input_ids"].shape[1]
