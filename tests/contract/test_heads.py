"""How transformers names the output heads of its causal models: the files of an adapter tell a head by its name alone."""

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from loragate.gates.eligibility import output_head
from loragate.models.folder_gates import is_never_gated

pytestmark = [pytest.mark.contract, pytest.mark.slow("families")]


def test_heads_are_told_by_their_names():
    seen, wrong = 0, []
    for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        try:
            with torch.device("meta"):
                built = model(config())
        except Exception:  # a default configuration that makes no model
            continue
        head = output_head(built)
        linear = {path: module for path, module in built.named_modules() if isinstance(module, nn.Linear)}
        wrong += [(model.__name__, path) for path in linear if is_never_gated(path) != (linear[path] is head)]
        seen += 1
    assert seen > 120
    # a second head, which cuts its bytes into patches
    assert wrong == [("BltForCausalLM", "model.patcher.lm_head")]
