"""Float32 weights in fewer bytes: the same logits to the bit, rows alone as in a batch, and the originals gone."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.packed import PackedLinear
from pdserve.kernels.strips import Form
from tests.engine.test_fused import CHUNKS, run
from tests.engine.tiny_models import FAMILIES, build

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def load(model: PreTrainedModel, weight_form: Form | None = None) -> LoadedModel:
    return describe(model, fingerprint="f", max_model_len=200, weight_form=weight_form)


def rounded(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """As a checkpoint in `dtype` that was loaded in float32."""
    return build(family).to(dtype).to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "gemma2"])
def test_shorter_weights_give_the_same_logits_to_the_bit(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        short = load(rounded(family, dtype))
    assert any(f"weights kept as {str(dtype)[6:]} (" in record.getMessage() for record in caplog.records)
    assert torch.equal(run(short, CHUNKS), run(load(rounded(family, dtype), "float32"), CHUNKS))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_embeddings_and_what_is_no_linear_keep_their_float32_weights(family: str) -> None:
    model = build(family)
    before = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    shared = model.get_input_embeddings().weight
    load(model)
    names = {name.removesuffix(".weight") for name, weight in model.named_parameters() if weight.dim() > 1}
    assert before
    assert not {name.replace(".original.", ".") for name in names} & before
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert model.get_input_embeddings().weight is shared
