"""One prefill and one decode worker with the demo model, behind API keys: what the libraries of others talk to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.gateway.api_keys import line_for
from tests.exact.reference import Reference, demo_reference, demo_tokenizer, template_ids
from tests.system.conftest import pytest_runtest_makereport
from tests.system.harness import System

__all__ = ["pytest_runtest_makereport"]

# Before a library reads them: none of these may report to its makers, or look for prices or settings on the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["HF_DATASETS_OFFLINE"] = "1"
for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
    os.environ.pop(name, None)

MODEL = "demo"
KEY = "pds-for-the-tests"
HURRIED_KEY = "pds-that-may-ask-once"
"""A key whose second request within a minute is refused."""
QUESTION = "Name two rivers of Europe."
TOKENS = 24
TIMEOUT_S = 100.0  # of one request


def pytest_configure(config: pytest.Config) -> None:
    for warning in (".*`ReadOnly` qualifier.*:UserWarning", "Accessing the 'model_.*"):  # of LiteLLM's own types
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@dataclass(frozen=True)
class Served:
    """What a user of a client library knows about the system."""

    system: System

    @property
    def base_url(self) -> str:
        return f"{self.system.url}/v1"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Every prompt is computed by prefill and moves to decode."""
    keys: Path = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"{line_for('tests', KEY)}\n{line_for('hurried', HURRIED_KEY)} requests-per-minute=1\n")
    blocks = ("--kv-blocks", 512, "--prefill-kv-blocks", 512, "--check-invariants")
    launch = System("demo", "--api-keys", keys, "--local-prefill", "never", *blocks)
    launch.client.use_key(KEY)
    with launch as system:
        yield Served(system)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a block held or a request in flight, whatever its library does with connections."""
    yield
    if "served" in request.fixturenames:
        system: System = request.getfixturevalue("served").system
        system.assert_idle(2.0)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The demo model as transformers runs it."""
    return demo_reference()


@pytest.fixture(scope="session")
def golden(reference: Reference) -> str:
    """The greedy answer to `QUESTION` in `TOKENS` tokens, by transformers."""
    ids = reference.output(template_ids([{"role": "user", "content": QUESTION}]), TOKENS)
    return str(demo_tokenizer().decode(ids, skip_special_tokens=True))
