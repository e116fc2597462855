"""lm-evaluation-harness' own vLLM model on gated folders: needs vLLM (scripts/vllm_cpu_env.sh) and lm_eval beside it."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_gates import SETTINGS, SHAPE, gated_model

import loragate as lg
from loragate.gates.attach import gate_modules
from loragate.gates.override_names import parse_override
from tiny import tiny_tokenizer, write_base

pytestmark = [
    pytest.mark.slow("vLLM"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (scripts/vllm_cpu_env.sh)"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed beside vllm (pip install lm_eval)"
    ),
]
CONTEXT, OPTIONS = "w5 w9 w20 w33", (" w7 w100", " w8", " w101 w12 w13")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("harness")
    write_base(place / "base", **SHAPE)
    lg.save_gates(gated_model("wide"), place / "wide", base_id=str(place / "base"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield place


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=index) for index, one in enumerate(arguments)]


@pytest.mark.parametrize("place", ["wide", "wide@unit"])
def test_its_vllm_model_scores_with_the_gates(folder: Path, place: str) -> None:
    """Log-likelihoods and greedy answers are those of its transformers model over the gated model in memory."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.vllm_causallms import VLLM

    scored = requests("loglikelihood", [(CONTEXT, option) for option in OPTIONS])
    asked = requests("generate_until", [(CONTEXT, {"until": [], "max_gen_toks": 12, "do_sample": False})])
    served = VLLM(
        pretrained=str(folder / "base"),
        dtype="float32",
        lora_local_path=str(folder / place),
        max_lora_rank=8,
        max_model_len=128,
        gpu_memory_utilization=0.3,
    )
    try:
        found = served.loglikelihood(scored), served.generate_until(asked)
    finally:
        served.model.llm_engine.engine_core.shutdown()
        del served
        gc.collect()
    model = gated_model("wide")
    if "@" in place:
        for gate in gate_modules(model).values():
            gate.override = parse_override(place.split("@")[1])
    settings = {"tokenizer": tiny_tokenizer(), "backend": "causal", "batch_size": 1, "max_length": 128}
    here = HFLM(pretrained=model, **settings)
    expected = here.loglikelihood(scored), here.generate_until(asked)
    torch.testing.assert_close(
        torch.tensor([one[0] for one in found[0]]), torch.tensor([one[0] for one in expected[0]]), rtol=0, atol=1e-3
    )
    assert found[1][0].split() == expected[1][0].split()
    plain = HFLM(pretrained=lg.detach_gates(model), **settings).loglikelihood(scored)
    assert max(abs(one[0] - other[0]) for one, other in zip(plain, expected[0])) > 0.01
