"""lm-eval's `local-completions`: log likelihoods of continuations over HTTP are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.clients.conftest import KEY, MODEL, Served
from tests.exact.reference import Reference, demo_tokenizer

pytestmark = pytest.mark.timeout(400, method="signal")

TOLERANCE = 1e-3
TASK = "rivers_and_cities"
DOCUMENTS = [
    {"question": "The capital of France is", "choices": [" Paris", " Oslo", " a river"], "answer": 0},
    {"question": "Water is made of hydrogen and", "choices": [" iron", " oxygen", " salt and pepper"], "answer": 1},
    {"question": "A week has seven", "choices": [" wheels", " months", " days"], "answer": 2},
    {"question": "The opposite of hot is", "choices": [" cold", " blue", " very hot indeed"], "answer": 0},
    {"question": "Bees make", "choices": [" paper planes", " honey", " glass"], "answer": 1},
]


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """One task of several choices, in a directory of its own."""
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / f"{TASK}.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.fixture
def tokenizer_directory(tmp_path: Path) -> Path:
    """The demo's tokenizer as transformers saves it: lm-eval sends token ids."""
    directory = tmp_path / "tokenizer"
    demo_tokenizer().save_pretrained(directory)
    return directory


def log_likelihood(model: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation, and whether it is what the model itself would say."""
    tokenizer = demo_tokenizer()
    whole = tokenizer(context + continuation).input_ids
    start = len(tokenizer(context).input_ids)
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    said = scores[start - 1 : -1]
    targets = torch.tensor(whole[start:])
    chosen = said.gather(1, targets[:, None])
    return float(chosen.sum()), bool((said.argmax(-1) == targets).all())


def test_log_likelihoods_of_a_task_are_those_of_transformers(
    served: Served, reference: Reference, tasks: TaskManager, tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    client = LocalCompletionsAPI(
        base_url=f"{served.base_url}/completions",
        model=MODEL,
        tokenizer=str(tokenizer_directory),
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_retries=1,
        batch_size=2,
    )
    result = simple_evaluate(client, tasks=[TASK], task_manager=tasks, bootstrap_iters=0, log_samples=True)
    assert result is not None
    samples = sorted(result["samples"][TASK], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(DOCUMENTS)
    right = 0
    for document, sample in zip(DOCUMENTS, samples, strict=True):
        expected = [log_likelihood(reference.model, document["question"], text) for text in document["choices"]]
        got = [(float(value), greedy in (True, "True")) for ((value, greedy),) in sample["resps"]]
        for (value, greedy), (reference_value, reference_greedy) in zip(got, expected, strict=True):
            assert value == pytest.approx(reference_value, abs=TOLERANCE)
            assert greedy == reference_greedy
        right += max(range(3), key=lambda i: expected[i][0]) == document["answer"]
    assert result["results"][TASK]["acc,none"] == right / len(DOCUMENTS)
    assert served.system.metric("pdserve_transfer_bytes_total") > 0
