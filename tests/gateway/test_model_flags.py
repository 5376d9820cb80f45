"""--model, --alias and the flags that may differ from model to model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.gateway.config import GatewayConfig, parse_arguments
from pdserve.gateway.model_flags import ModelSource
from pdserve.transfer.errors import ConfigError


def parsed(*argv: str) -> GatewayConfig:
    return parse_arguments(argv)[0]


def models(*argv: str) -> dict[str, str]:
    return {model.name: model.source for model in parsed(*argv).models}


def test_one_model_is_named_by_its_directory_or_by_the_flag_for_that(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert models("--model", str(odd)) == {"a=b": str(odd)}
    assert models("--model", "demo") == {"demo": "demo"}
    assert models("--model", "demo", "--served-model-name", "x") == {"x": "demo"}
    assert models("--model", "/not/there=x") == {"/not/there=x": "/not/there=x"}


def test_several_models_are_named_one_by_one_or_by_their_directories(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    found = models("--model", "org/a=demo", "--model", str(tmp_path / "b"), "--model", "c=/x/y=z")
    assert found == {"org/a": "demo", "b": str(tmp_path / "b"), "c": "/x/y=z"}


def test_aliases_have_weights_of_1_unless_given() -> None:
    config = parsed("--model", "a=m", "--model", "b:2=m", "--alias", "x=a:90,b:2:10", "--alias", "y=b:2,a")
    assert [(alias.name, alias.weights) for alias in config.aliases] == [
        ("x", {"a": 90, "b:2": 10}),
        ("y", {"b:2": 1, "a": 1}),
    ]


def test_a_value_for_one_model_goes_before_one_for_all_in_any_order() -> None:
    two = ("--model", "a=m", "--model", "b=m")
    assert parsed(*two, "--max-model-len", "b=7", "--max-model-len", "9").max_model_lens == {"a": 9, "b": 7}
    assert parsed(*two, "--max-model-len", "a=5").max_model_lens == {"a": 5}
    assert parsed(*two, "--chat-template", "b=/x=y", "--chat-template", "z=").chat_templates == {
        "a": Path("z="),
        "b": Path("/x=y"),
    }
    assert parsed("--model", "demo", "--max-model-len", "8").max_model_lens == {"demo": 8}
    assert parsed("--model", "demo").models == (ModelSource("demo", "demo"),)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "a=m", "--model", "a=n"], "name a is given twice"),
        (["--model", "x/demo", "--model", "x/demo"], "x/demo is given twice"),
        (["--model", "a=m", "--served-model-name", "x"], "exclude each other"),
        (["--model", "m", "--model", "n", "--served-model-name", "x"], "names one model"),
        (["--model", "a=m", "--alias", "x"], "--alias x"),
        (["--model", "a=m", "--alias", "=a"], "--alias =a"),
        (["--model", "a=m", "--alias", "a=a"], "a name of its own"),
        (["--model", "a=m", "--alias", "x=a", "--alias", "x=a"], "a name of its own"),
        (["--model", "a=m", "--alias", "x=b"], "no model 'b'"),
        (["--model", "a=m", "--alias", "x=a:-1"], "no model 'a:-1'"),
        (["--model", "a=m", "--alias", "x=a:0"], "more than 0"),
        (["--model", "a=m", "--alias", "x=a,a"], "there twice"),
        (["--model", "a=m", "--max-model-len", "b=5"], "models: a"),
        (["--model", "a=m", "--max-model-len", "five"], "--max-model-len five"),
        (["--model", "a=m", "--max-model-len", "a=-5"], "--max-model-len -5"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parsed(*flags)
