"""An adapter merged into its base: the written model computes the adapter, whatever it changes, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from beside import BESIDE, loaded, make
from loragate.errors import LoragateError
from loragate.models import merge
from tiny import logits

IDS = torch.tensor([[5, 9, 20, 33, 7, 100, 4, 8]])


@pytest.mark.parametrize("kind", BESIDE)
def test_the_merged_model_computes_the_adapter(tmp_path: Path, kind: str) -> None:
    base, adapter = make(tmp_path, kind)
    expected = logits(loaded(kind, adapter), IDS)
    folder = merge.merge_adapter(str(base), adapter, tmp_path / "merged")
    found = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(found, IDS), expected, rtol=1e-4, atol=1e-4)


def test_a_merged_model_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    base, adapter = make(tmp_path, "embeddings and head")
    right = merge.base_weights

    def without_change(ref: Any, **arguments: Any) -> Any:
        return right(type(ref)(str(base)), **arguments)

    monkeypatch.setattr(merge, "base_weights", without_change)
    with pytest.raises(LoragateError, match=r"merged into .* does not compute what the adapter on its base does"):
        merge.merge_adapter(str(base), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged" / merge.RECORD).exists()
