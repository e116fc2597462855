"""`loragate eval --engine vllm` reads a few answers again with transformers, and fails where vLLM was another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_kit import words_task

from loragate.cli.main import main
from loragate.evaluation.agreement import LOGPROB_TOLERANCES
from loragate.evaluation.engines import EngineProvider, load
from loragate.evaluation.results import read_record
from loragate.evaluation.variants import ModelVariant, activate_variant
from loragate.generation import Engine, TransformersEngine
from tiny import write_rows


class OtherEngine(Engine):
    """In the place of vLLM: transformers in memory, told the model by names, as vLLM is."""

    believes: Any = staticmethod(lambda adapter, override: (adapter, override))

    def __init__(self, loaded: Any, adapter: str | None = None, override: str | None = None) -> None:
        self.loaded, self.adapter, self.override = loaded, adapter, override
        self.inner = TransformersEngine(loaded.model, loaded.tokenizer, batch_size=4)

    def with_adapter(self, adapter: str | None, override: str | None = None) -> OtherEngine:
        return OtherEngine(self.loaded, adapter, override)

    def variant(self) -> ModelVariant:
        adapter, override = self.believes(self.adapter, self.override)
        if adapter is None:
            return ModelVariant("base")
        scale = override and float(override.removeprefix("constant="))
        return ModelVariant("gated" if adapter.endswith("gated") else "adapter", scale=scale)

    def draw(self, prompts: Any, config: Any, rows: Any) -> Any:
        with activate_variant(self.loaded.model, self.variant(), self.loaded.kind):
            yield from self.inner.draw(prompts, config, rows)

    def log_likelihoods(self, pairs: Any, on_progress: Any = None) -> Any:
        with activate_variant(self.loaded.model, self.variant(), self.loaded.kind):
            return self.inner.log_likelihoods(pairs, on_progress)


@pytest.fixture
def on_vllm(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`loragate eval --engine vllm` of a gated folder; told which model the engine is when it is asked to be another."""
    write_rows(tmp_path / "words.jsonl", [{"question": f"w{at} w{at + 1}", "answer": "w3"} for at in range(6)])
    (tmp_path / "words.yaml").write_text(words_task("question", samples=2, tokens=8, version=1))
    monkeypatch.setattr("loragate.evaluation.prepared.require_vllm", lambda: None)
    monkeypatch.setattr("loragate.evaluation.engines.require_gate_plugin", lambda folder: None)
    monkeypatch.setattr("loragate.cli.evaluation_runs.require_served", lambda *_: None)
    loaded = load(str(saved / "gated"))
    monkeypatch.setattr(EngineProvider, "_vllm_of", lambda *_: lambda: OtherEngine(loaded))

    def run(*more: str, believes: Any = OtherEngine.believes) -> int:
        monkeypatch.setattr(OtherEngine, "believes", staticmethod(believes))
        words = ["eval", "--model", str(saved / "gated"), "--tasks", str(tmp_path / "words.yaml"), "--engine", "vllm"]
        return main([*words, "--dtype", "float32", "--out", str(tmp_path / "out"), *more])

    return run


def test_answers_of_vllm_are_read_again_with_transformers(on_vllm: Any, tmp_path: Path, capsys: Any) -> None:
    """Every model once, whatever its temperature; in the record and below the tables, and after a kill."""
    assert on_vllm() == 0
    found = read_record(tmp_path / "out" / "results.json").agreement
    assert set(found) == {"adapter", "base", "gated", "adapter λ=0.5"}
    assert all(one.agrees and one.mean < 1e-5 and one.nearest == label for label, one in found.items())
    assert all(4 <= one.tokens <= 4 * 8 and one.limit == LOGPROB_TOLERANCES["float32"] for one in found.values())
    assert "tokens were compared with transformers: the largest mean difference is" in " ".join(
        capsys.readouterr().out.split()
    )
    (tmp_path / "out" / "agreement" / "gated.json").unlink()
    assert on_vllm("--resume") == 0, "no answer is drawn again, and the engine is asked for what is missing"
    assert read_record(tmp_path / "out" / "results.json").agreement == found


@pytest.mark.parametrize(
    ("believes", "wrong", "nearest"),
    [
        (lambda adapter, override: (adapter and adapter.replace("gated", "plain"), override), "gated", "adapter"),
        (lambda adapter, override: (None, None), "adapter", "base"),
        (lambda adapter, override: (adapter, override and "constant=1"), "adapter λ=0.5", "adapter"),
    ],
)
def test_a_wrong_lambda_of_vllm_ends_the_evaluation(
    on_vllm: Any, tmp_path: Path, capsys: Any, believes: Any, wrong: str, nearest: str
) -> None:
    """The gates' λ left out, the adapter left out, a scale left out: the figures are written and the command fails."""
    assert on_vllm(believes=believes) == 1
    found = read_record(tmp_path / "out" / "results.json").agreement
    assert (found[wrong].agrees, found[wrong].nearest) == (False, nearest)
    assert found["base"].agrees
    said = " ".join(capsys.readouterr().err.split())
    assert f"{wrong} is off by" in said
    assert "vLLM did not compute what transformers computes" in said
    assert on_vllm("--resume", believes=believes) == 1, "nor does it pass when it goes on"
