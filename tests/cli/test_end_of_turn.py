"""A base whose EOS is not the chat template's end of turn (Qwen2.5-Math, the base models of Qwen3): every command stops there."""

import json
from types import SimpleNamespace

import pytest
from command_kit import TRAINING, words_task

import loragate as lg
from loragate.cli.main import main
from loragate.cli.serve import ServeOptions
from loragate.errors import ConfigError
from loragate.gates.schema import read_gate_config
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.models import open_tokenizer
from loragate.serving.vllm_server import served_adapters, vllm_arguments
from tiny import (
    TURN_END,
    chatml_tokenizer,
    ending_base,
    run,
    shake,
    tiny_adapter,
    tiny_rows,
    write_adapter,
    write_base,
    write_rows,
)

EOS, LIMIT = 1, "60"
PROBE = ["--dev-grader", "exact", "--dev-samples", "2", "--dev-max-new-tokens", LIMIT]


def build(place, tokenizer, **shape):
    """Base, adapter, gated adapter, rows and questions in a folder."""
    write_base(place / "base", ending_base(**shape), tokenizer)
    model = write_adapter(place / "adapter", place / "base", tiny_adapter(base=ending_base(**shape), lora_alpha=1))
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2)), 0.3)
    lg.save_gates(model, place / "gated", adapter_source=place / "adapter", base_id=str(place / "base"))
    write_rows(place / "train.jsonl", tiny_rows(40))
    words = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4} w{i + 5}" for i in range(1, 36)]
    write_rows(place / "words.jsonl", [{"prompt": prompt, "answer": f"w{i}"} for i, prompt in enumerate(words)])
    (place / "words.yaml").write_text(words_task(tokens=60))
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return build(tmp_path_factory.mktemp("chatml"), chatml_tokenizer())


@pytest.fixture
def drawn(monkeypatch):
    """All samples that the engine in memory gives."""
    samples = []
    generate = TransformersEngine.generate

    def spied(self, *arguments, **options):
        found = generate(self, *arguments, **options)
        samples.extend(found)
        return found

    monkeypatch.setattr(TransformersEngine, "generate", spied)
    return samples


def require_ended(samples):
    assert samples
    assert {sample.finish_reason for sample in samples} == {"stop"}
    assert {sample.token_ids[-1] for sample in samples} == {TURN_END}
    assert all(TURN_END not in sample.token_ids[:-1] for sample in samples)


def test_without_the_template_nothing_would_end_these_answers(place):
    """What the tests below would see: no answer ends at the EOS."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = None
    engine = TransformersEngine(ending_base(), tokenizer)
    assert engine.endings.token_ids == {EOS}
    samples = engine.generate(["<user> w3 <assistant> "], SamplingConfig(max_new_tokens=60, samples=8))
    assert {sample.finish_reason for sample in samples} == {"length"}
    assert all(TURN_END in sample.token_ids for sample in samples)


COMMANDS = {
    **{
        f"generate {model}": ["generate", "--model", model, "--prompt", "w2 w3", "--samples", "4"]
        for model in ("base", "adapter", "gated")
    },
    "eval": ["eval", "--model", "gated", "--tasks", "words.yaml", "--limit", "4", "--out", "out"],
    "calibrate": [
        *("calibrate", "--adapter", "adapter", "--data", "train.jsonl", "--dev-data", "words.jsonl", *PROBE, *TRAINING),
        *("--ranges=0,1", "--out", "out"),
    ],
    "diagnose interventions": [
        *("diagnose", "interventions", "--model", "gated", "--tasks", "words.yaml", "--limit", "3", "--out", "out"),
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_stops_at_the_end_of_the_turn(place, tmp_path, monkeypatch, drawn, name, capsys):
    files = {"base", "adapter", "gated", "train.jsonl", "words.jsonl", "words.yaml"}
    words = [
        str(tmp_path / word) if word == "out" else str(place / word) if word in files else word
        for word in COMMANDS[name]
    ]
    # greedily these answers end at once, so that a dev set finds nothing to judge in them
    assert main(words) == (2 if name == "calibrate" else 0)
    require_ended(drawn)
    assert "token limit" not in capsys.readouterr().out
    if name == "eval":
        told = json.loads((tmp_path / "out" / "run.json").read_text())
        assert told["end_of_turn"] == {"token_ids": [TURN_END]}, "answers of a version that ran on are not resumed"
        record = json.loads((tmp_path / "out" / "results.json").read_text())
        assert {row["truncated"] for row in record["results"]} == {0.0}


def test_the_cells_of_a_sweep_stop_there_too(place, tmp_path, monkeypatch, drawn):
    sweep = ["sweep", "--adapter", place / "adapter", "--data", place / "train.jsonl", "--ranges=0,1", "--seeds", "0"]
    run(*sweep, "--batch-size", "16", "--k", "20", "--runner", "sequential", "--out", tmp_path / "out")
    (cell,) = (path.parent for path in (tmp_path / "out" / "trials").glob("*/gated"))
    assert read_gate_config(cell / "gated")["stop_token_ids"] == [EOS, TURN_END]
    require_the_same_of_its_evaluation(place, tmp_path, monkeypatch, drawn)


def require_the_same_of_its_evaluation(place, tmp_path, monkeypatch, drawn):
    """`eval --sweep` on the cells in `out`; vLLM, which loads no gates into memory, is told what the cells record."""
    drawn.clear()
    words = ["eval", "--sweep", tmp_path / "out", "--tasks", place / "words.yaml", "--limit", "2", "--out"]
    assert main([*map(str, words), str(tmp_path / "cells")]) == 0
    require_ended(drawn)
    told = json.loads((tmp_path / "cells" / "run.json").read_text())
    assert told["end_of_turn"] == {"token_ids": [TURN_END]}
    given = []

    def prepare(request, tasks, loaded):
        given.append(loaded.stop_token_ids)
        raise ConfigError("seen")

    monkeypatch.setattr("loragate.evaluation.prepared.require_vllm", lambda: None)
    monkeypatch.setattr("loragate.cli.evaluation_runs.load_inputs", lambda *_: SimpleNamespace(model=None))
    monkeypatch.setattr("loragate.evaluation.prepared.Request.prepare", prepare)
    assert main([*map(str, words), str(tmp_path / "vllm"), "--engine", "vllm"]) == 2
    assert given == [(EOS, TURN_END)]


def test_the_explorer_stops_at_the_end_of_the_turn(place, drawn):
    from loragate.serving.explore import Session

    model, tokenizer = lg.load_gated(place / "gated"), chatml_tokenizer()
    Session(model, tokenizer, False, "none").respond("w3 w4", 1.0, 60, 0, -3.0, 2.0)
    assert len(drawn) == 3
    require_ended(drawn)


def test_a_template_given_on_the_command_line_decides_and_the_artifact_keeps_it(place, tmp_path, drawn, capsys):
    """The tokenizer has no template of its own: without the record, answers to `--raw` prompts would run on."""
    bare = chatml_tokenizer()
    template = tmp_path / "chatml.jinja"
    template.write_text(bare.chat_template)
    bare.chat_template = None
    (tmp_path / "bare").mkdir()
    build(tmp_path / "bare", bare)
    calibrate = ["calibrate", "--adapter", tmp_path / "bare" / "adapter", "--data", place / "train.jsonl", *TRAINING]
    calibrate += ["--ranges=0,1", "--skip-selection", "--chat-template", template, "--out", tmp_path / "gated"]
    run(*calibrate)
    assert json.loads((tmp_path / "gated" / "gate_config.json").read_text())["stop_token_ids"] == [EOS, TURN_END]
    assert lg.load_gated(tmp_path / "gated").generation_config.eos_token_id == [EOS, TURN_END]
    for path in (tmp_path / "gated" / "adapter" / "tokenizer").glob("chat_template*"):
        path.unlink()
    run("generate", "--model", tmp_path / "gated", "--raw", "--prompt", "w1", "--samples", "4")
    require_ended(drawn)
    given = ["--model", tmp_path / "bare" / "adapter", "--chat-template", template]
    run("generate", *given, "--prompt", "w1", "--samples", "4")
    require_ended(drawn)


def test_vllms_server_is_given_what_it_does_not_know(place, tmp_path):
    """`--generation-config` with all stop tokens, where tokenizer and base do not name them; nothing otherwise."""
    options = ServeOptions(model=str(place / "gated"))
    base, adapters = served_adapters(options)
    asked = (options, options.system, base, adapters, open_tokenizer(base, options), tmp_path)
    arguments = vllm_arguments(*asked)
    assert arguments[arguments.index("--generation-config") + 1] == str(tmp_path)
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert told["eos_token_id"] == [EOS, TURN_END]
    (place / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, TURN_END], "top_k": 7}))
    try:
        assert "--generation-config" not in vllm_arguments(*asked)
    finally:
        (place / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "pad_token_id": 0}))
