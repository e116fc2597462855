"""`loragate eval` and `regrade` on small local files: rows, resume, and what bad input is answered with."""

import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_kit import words_task
from peft import PeftModel
from transformers import AutoModelForCausalLM

import loragate as lg
from loragate.cli.evaluate import EvalOptions
from loragate.cli.evaluation_runs import load_inputs, make_request, next_line
from loragate.cli.main import main
from loragate.display import percent
from loragate.errors import DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.engines import EngineProvider, find_available_variants, load
from loragate.evaluation.evaluate import open_evaluation
from loragate.evaluation.judging import grading_fingerprint, read_grades, write_grades
from loragate.evaluation.results import read_record
from loragate.evaluation.sandbox import probe as probe_sandbox
from loragate.evaluation.settings import EngineSettings, GradingSettings, TaskSettings
from loragate.evaluation.statistics import average_at_k, compare_out_of_fold, out_of_fold, simultaneous
from loragate.evaluation.tasks import load_task
from loragate.evaluation.variants import (
    ModelVariant,
    activate_variant,
    at_temperatures,
    canary,
    control_temperatures,
    variants_for,
)
from loragate.files import file_lock
from loragate.generation import Sample, SampleWriter, SamplingConfig
from loragate.models import Loaded, Loading, ModelRef, resolve
from loragate.models.merge import merge_and_save
from loragate.recipes import QUESTIONS
from tiny import shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter, write_rows

TASK = words_task("question", samples=4, tokens=5, version=3)


def test_a_long_question_lowers_no_other_questions_token_limit(place):
    from loragate.evaluation.prepared import prepare
    from loragate.evaluation.tasks import load_questions, load_task

    task = load_task(str(place / "words.yaml"))
    rows = [{"question": " ".join(["w5"] * count), "answer": "w3"} for count in (2, 20, 30)]
    (place / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = load_questions(task, str(place / "long.jsonl"))
    prepared = prepare(task, questions, tiny_tokenizer(), TaskSettings(max_new_tokens=24), 40)
    assert prepared.sampling.max_new_tokens == 24
    (told,) = (warning for warning in prepared.warnings if "positions" in warning)
    assert "2 of 3 questions leave fewer than 24" in told
    assert "the shortest after 8 tokens" in told
    assert not any("positions" in text for text in prepare(task, questions, tiny_tokenizer(), TaskSettings()).warnings)
    with pytest.raises(DataError, match="only 32 positions"):
        prepare(task, questions, tiny_tokenizer(), TaskSettings(), 32)


def test_questions_that_repeat_another_are_said(place):
    from loragate.evaluation.prepared import prepare
    from loragate.evaluation.tasks import load_questions

    task, warnings = load_task(str(place / "words.yaml")), []
    for repeats in (0, 3):
        rows = [{"question": f"w{index}", "answer": "w3"} for index in (*range(5), *range(repeats))]
        path = write_rows(place / "repeats.jsonl", [*rows, {"question": "w0", "answer": "w4"}])
        questions = load_questions(task, str(path))
        warnings.append(prepare(task, questions, tiny_tokenizer(), TaskSettings()).warnings)
    assert not warnings[0], "the same prompt with another gold is another question"
    assert "words: 3 of 9 questions repeat another (same prompt and gold)" in warnings[1][0]


@pytest.fixture(scope="module")
def place(saved, tmp_path_factory):
    """base/, adapter/, gated/, and a task of the user's own."""
    root = tmp_path_factory.mktemp("evaluation")
    for name in ("base", "adapter", "gated"):
        (root / name).symlink_to(saved / name)
    write_rows(root / "words.jsonl", [{"question": f"w{index} w{index + 1}", "answer": "w3"} for index in range(6)])
    (root / "words.yaml").write_text(TASK)
    return root


FEW = ("--controls", "none")


def run(place, model, out, *more, tasks=None):
    tasks = (tasks or place) / "words.yaml"
    return main(["eval", "--model", str(place / model), "--tasks", str(tasks), "--out", str(out), *more])


def test_rows_of_each_kind():
    assert [v.label for v in variants_for("base")] == ["base"]
    assert [v.label for v in variants_for("adapter", "none")] == ["adapter", "base"]
    variants = variants_for("gated", "cheap", [-0.5, 0.5, 0.5])  # one row per name
    names = ["adapter", "base", "gated", "adapter λ=-0.5", "adapter λ=0.5"]
    assert [v.label for v in variants] == names
    added = at_temperatures(variants, control_temperatures("gated", "cheap"))[len(names) :]
    assert [v.label for v in added] == [f"{name} {how}" for how in ("T=0.6", "T=0.3", "greedy") for name in names]
    assert {v.reference_label for v in added if v.label.endswith("T=0.3")} == {"adapter", "adapter T=0.3"}
    assert [control_temperatures(*of) for of in (("base", "cheap"), ("gated", "none"), ("gated", "alone"))] == [()] * 3
    with pytest.raises(lg.errors.ConfigError, match="λ = 0 is the base"):
        variants_for("gated", "cheap", [0.0])
    with pytest.raises(lg.errors.ConfigError, match="cheap"):
        variants_for("gated", "chaep")
    assert ModelVariant("adapter").with_temperature(0).sampling(SamplingConfig(samples=16)).samples == 1


def test_a_row_is_the_model_it_names():
    base = tiny_base()
    ids = torch.arange(5, 15)[None]
    plain = base(input_ids=ids).logits
    model = tiny_adapter(base=base)
    adapter = model(input_ids=ids).logits
    logits = lambda: model(input_ids=ids).logits  # noqa: E731
    with activate_variant(model, ModelVariant("base"), "adapter"):
        assert torch.equal(logits(), plain)
    with activate_variant(model, ModelVariant("adapter", "λ=0.5", scale=0.5), "adapter"):
        half = logits()
    assert not torch.allclose(half, adapter, atol=1e-3)
    assert torch.equal(logits(), adapter), "temporary gates are taken off again"
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2)), 0.5)
    gated = logits()
    for variant, expected in [
        (ModelVariant("base"), plain),
        (ModelVariant("adapter"), adapter),
        (ModelVariant("gated"), gated),
        (ModelVariant("adapter", "λ=0.5", scale=0.5), half),
    ]:
        with activate_variant(model, variant, "gated"):
            assert torch.allclose(logits(), expected, atol=1e-6), variant.label
    assert not torch.allclose(gated, adapter, atol=1e-3)
    with (
        pytest.raises(lg.errors.ConfigError, match="no gates"),
        activate_variant(model, ModelVariant("gated"), "adapter"),
    ):
        pass


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (ModelVariant("gated"), "G --temperature 0.7"),
        (ModelVariant("gated").with_temperature(0.0), "G --temperature 0"),
        (ModelVariant.scaled(0.5).with_temperature(0.3), "A@constant=0.5 --temperature 0.3"),
        (ModelVariant.scaled(0.5, "lower"), "A@lower=0.5 --temperature 0.7"),
        (ModelVariant("base").with_temperature(0.6), "B --temperature 0.6"),
    ],
)
def test_what_is_proposed_next_is_the_best_row(best, said):
    found = (ModelVariant("adapter"), best, ModelVariant("gated", "random gates", random=0))
    rows = [
        SimpleNamespace(task="words", avg_at_k=SimpleNamespace(mean=mean), variant=one.weights, **vars(one))
        for mean, one in enumerate(found)
    ]
    info = SimpleNamespace(name="words", grader="exact", sampling=SamplingConfig(0.7))
    models = {"base": "B", "adapter": "A", "gated": "G"}
    line = next_line(Path("run"), SimpleNamespace(tasks=[info], results=rows, models=models))
    assert line == f'next: loragate generate --model {said} --prompt "…"'
    for row in rows:
        row.avg_at_k = SimpleNamespace(mean=1.0)
    rows[1:2] = [SimpleNamespace(**{**vars(rows[1]), "temperature": one}) for one in (0.3, 0.0, 0.6)]
    line = next_line(Path("run"), SimpleNamespace(tasks=[info], results=rows, models=models))
    assert "--temperature 0 --prompt" in line, "of equals the coldest"


def test_the_canary_refuses_what_does_not_act():
    tokenizer, prompts = tiny_tokenizer(), ["w1 w2 w3", "w4"]
    model = tiny_adapter()
    assert canary(model, tokenizer, prompts, "adapter")["adapter_from_base"] > 0.1
    assert canary(model, tokenizer, prompts, "base") == {}
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2)), 0.5)
    figures = canary(model, tokenizer, prompts, "gated")
    assert figures["zero_from_base"] == 0
    assert figures["one_from_adapter"] < 1e-5
    assert figures["gates_from_adapter"] > 0.01
    shake(model, 0)
    with pytest.raises(lg.errors.GateError, match="change no logit"):
        canary(model, tokenizer, prompts, "gated")
    dead = tiny_adapter(init_lora_weights=True)
    with pytest.raises(lg.errors.GateError, match="adapter changes no logit"):
        canary(dead, tokenizer, prompts, "adapter")


def test_all_rows_side_by_side(place, tmp_path, capsys):
    assert run(place, "gated", tmp_path / "run") == 0
    text = capsys.readouterr().out
    for words in ("canary: the adapter moves logits by", "adapter T=0.6", "95 % intervals", "next: loragate"):
        assert words in " ".join(text.split()), words
    record = read_record(tmp_path / "run" / "results.json")
    assert record.range == (-3, 2), "whatever the folder is called"
    names, at_own = [row.label for row in record.results], ["adapter", "base", "gated", "adapter λ=0.5"]
    assert names == at_own + [f"{name} {how}" for how in ("T=0.6", "T=0.3", "greedy") for name in at_own]
    for how in ("T=0.6", "T=0.3", "greedy"):  # best against best: the gates meet the adapter at their own temperature
        ours, theirs = (record.find("words", acts, how) for acts in ("gated", "adapter"))
        assert ours.comparison.mean == pytest.approx(ours.avg_at_k.mean - theirs.avg_at_k.mean)
    gated = record.find("words", "gated")
    assert gated.avg_at_k.questions == 6
    assert gated.avg_at_k.samples == 4
    assert sum(gated.reasons.values()) == 24
    assert gated.comparison is not None
    assert gated.adjusted_p >= gated.comparison.p
    assert record.find("words", "adapter").comparison is None
    assert record.tasks[0].version == "3"
    assert record.canary["gates_from_adapter"] > 0
    assert record.versions["torch"] == torch.__version__.split("+")[0] or record.versions["torch"] == torch.__version__
    assert "| gated |" in (tmp_path / "run" / "results.md").read_text()


def test_an_evaluation_says_what_no_strength_reaches(place, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    write_adapter(tmp_path / "adapter", place / "base", tiny_adapter(base=base, modules_to_save=["norm"]))
    few = ("--samples", "1", "--limit", "1", "--max-new-tokens", "1")
    assert run(place, tmp_path / "adapter", tmp_path / "run", *few) == 0
    said = [one for one in read_record(tmp_path / "run" / "results.json").warnings if "no strength reaches" in one]
    assert len(said) == 1
    assert "norm" in said[0]
    assert run(place, tmp_path / "adapter", tmp_path / "alone", *few, *FEW) == 0
    assert "no strength reaches" not in (tmp_path / "alone" / "results.json").read_text()
    with pytest.raises(
        lg.errors.ConfigError, match=r"--constants 0: no strength reaches .*norm.*λ = 0 is not the base"
    ):
        find_available_variants(load(str(tmp_path / "adapter")), constants=[0])


def test_every_variant_at_every_temperature_that_is_given_and_at_no_other(place, tmp_path, capsys):
    out, few = tmp_path / "run", ("--constants", "0.5", "--samples", "2", "--limit", "4")
    assert run(place, "gated", out, *few, "--temperature", "0,1.5,0.6") == 0
    shown = " ".join(capsys.readouterr().out.split())
    names, path = ["adapter", "base", "gated", "adapter λ=0.5"], out / "results.json"
    record = read_record(path)
    assert record.tasks[0].sampling.temperature == 1.5, "the highest stands in place of the task's own"
    rows = [(row.label, row.temperature, row.avg_at_k.samples) for row in record.results]
    assert rows == [
        (f"{name}{suffix}", heat, samples)
        for suffix, heat, samples in (("", None, 2), (" T=0.6", 0.6, 2), (" greedy", 0.0, 1))
        for name in names
    ]
    # best against best, one λ too, by the statistics that the record is made with
    found = {
        name: out_of_fold(
            np.array(
                [record.find("words", f"{name}{suffix}").question_scores for suffix in ("", " T=0.6", " greedy")]
            ).T
        )
        for name in names
    }
    family, _ = simultaneous([compare_out_of_fold(found[name], found["adapter"]) for name in names[1:]])
    for name, versus in zip(names, [None, *family], strict=True):
        best = record.find("words", name).at_best
        assert best.score == average_at_k(found[name][:, None])
        assert best.comparison == versus
        assert f"{name} {percent(best.score.mean)}" in shown.partition("At its best temperature %:")[2]
    assert all(row.at_best is None for row in record.results if row.temperature is not None)
    assert {row.comparison and row.label for row in record.results if row.temperature == 0.6} == {
        f"{name} T=0.6" for name in names
    }

    before = {one: one.read_bytes() for one in (out / "samples").rglob("*.jsonl")}
    assert run(place, "gated", out, *few, "--temperature", "1.5,0.9,0.6,0", "--resume") == 0
    more = read_record(path)
    assert [row.label for row in more.results if row.temperature == 0.9] == [f"{name} T=0.9" for name in names]
    for row in record.results:  # with their own comparisons; p is of a larger family
        again = more.find("words", row.label)
        assert (again.question_scores, again.comparison and again.comparison.mean) == (
            row.question_scores,
            row.comparison and row.comparison.mean,
        )
    assert {one: one.read_bytes() for one in before} == before, "nothing is drawn again"
    assert len([*(out / "samples").rglob("*.jsonl")]) == len(before) + len(names)
    assert run(place, "gated", out, *few, "--temperature", "2,1.5", "--resume") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "was begun with tasks[0].sampling.temperature = 1.5, now it is 2.0" in said


def test_one_temperature_is_no_list_of_several(place, tmp_path):
    assert run(place, "gated", tmp_path / "run", "--temperature", "0.6", "--samples", "1", "--limit", "2") == 0
    record = read_record(tmp_path / "run" / "results.json")
    assert [row.label for row in record.results] == ["adapter", "base", "gated", "adapter λ=0.5"]
    assert record.tasks[0].sampling.temperature == 0.6
    assert not any(row.at_best for row in record.results)


def test_rows_that_were_begun_before_the_adapter_are_compared_with_it(place, tmp_path):
    out, few = tmp_path / "run", ("--samples", "2", "--limit", "3", "--temperature", "1,0")
    assert run(place, "gated", out, *few, "--controls", "alone") == 0
    assert run(place, "gated", out, *few, "--controls", "none", "--resume") == 0
    record, again = read_record(out / "results.json"), open_evaluation(out).judge()
    assert [row.label for row in again.results[:2]] == ["gated", "gated greedy"]
    for label in ("gated", "gated greedy", "adapter greedy"):
        assert again.find("words", label).comparison.mean == record.find("words", label).comparison.mean


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1,-0.5", "found -0.5, expected numbers from 0 (greedy) separated by commas, such as 1,0.6,0.3,0"),
        ("1,warm", "--temperature 1,warm: expected numbers from 0"),
        ("1,,0", "--temperature 1,,0: expected numbers"),
        ("nan", "found nan"),
        ("inf,1", "found inf"),
        ("1,0.60,0.6", "0.6 is given twice"),
    ],
)
def test_what_is_no_list_of_temperatures(place, tmp_path, fails, text, why):
    known = ("eval", "--model", tmp_path / "absent", "--tasks", place / "words.yaml", "--out", tmp_path / "out")
    assert why in fails(*known, "--temperature", text), "before a model is loaded"
    assert not (tmp_path / "out").exists(), "before anything is loaded"


@pytest.fixture(scope="module")
def dora(place):
    model = tiny_adapter(base=AutoModelForCausalLM.from_pretrained(place / "base"), use_dora=True)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    model.peft_config["default"].base_model_name_or_path = str(place / "base")
    model.save_pretrained(place / "dora")
    return place / "dora"


def test_a_dora_adapter_is_scored_and_says_which_controls_it_cannot_have(place, dora, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(place, dora, out, "--controls", "full", "--samples", "2", "--limit", "3") == 0
    record = read_record(out / "results.json")
    assert record.left_out == {"adapter λ=0.5": "DoRA"}
    assert "adapter λ=0.5" not in {row.label for row in record.results}
    assert record.find("words", "adapter", "greedy")
    assert "| adapter λ=0.5, not applicable: DoRA | – |" in (out / "results.md").read_text()
    shown = capsys.readouterr().out
    assert "not applicable: DoRA" in " ".join(shown.split())
    assert "loragate calibrate" not in shown, "a DoRA adapter takes no gates"
    assert run(place, dora, out, "--controls", "full", "--samples", "2", "--limit", "3", "--resume") == 0
    assert open_evaluation(out).left_out == record.left_out


def test_a_merged_adapter_answers_as_the_adapter_does(place, dora, tmp_path, monkeypatch):
    parts = (ModelRef(str(place / "base")), dora)
    merge_and_save(*parts, tmp_path / "merged")
    ids = torch.arange(5, 15)[None]
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    plain = base(ids).logits
    adapter = PeftModel.from_pretrained(base, dora)(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    assert not torch.allclose(adapter, plain, atol=1e-2)
    assert torch.allclose(merged, adapter, atol=1e-5)
    merge_and_save(*parts, tmp_path / "half", Loading(dtype="bfloat16"))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, value in half.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name].bfloat16()), "rounded once"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**3))
    with pytest.raises(lg.errors.LoragateError, match="GB are free"):
        merge_and_save(*parts, tmp_path / "none")


@pytest.mark.parametrize("adapted", ["lm_head", "embed_tokens"])
def test_a_delta_on_one_of_two_tied_layers_is_merged_into_that_one(place, tmp_path, adapted):
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    assert base.config.tie_word_embeddings
    tiny_adapter(base=base, use_dora=True, target_modules=["q_proj", adapted]).save_pretrained(tmp_path / "dora")
    ids = torch.arange(5, 15)[None]
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    expected = PeftModel.from_pretrained(base, tmp_path / "dora")(ids).logits
    merge_and_save(ModelRef(str(place / "base")), tmp_path / "dora", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
    assert not merged.config.tie_word_embeddings, "vLLM reads the head only where this says so"


def test_code_of_the_base_is_trusted_where_an_adapter_is_merged(dora, tmp_path, monkeypatch):
    told = {}

    def weights(base, **how):
        told.update(how)
        raise lg.errors.LoragateError("enough")

    monkeypatch.setattr("loragate.models.merge.base_weights", weights)
    loaded = Loaded(resolve(dora), Loading(trust_remote_code=True), None, None)
    with pytest.raises(lg.errors.LoragateError, match="enough"):
        EngineProvider(EngineSettings(engine="vllm"), str(dora), "", loaded, tmp_path).engine_factory(
            ModelVariant("adapter")
        )
    assert told["trust_remote_code"] is True


def test_rows_share_prompts_and_random_streams(place, whole, tmp_path):
    """The base row of a gated folder is the base itself; the adapter row is the adapter itself, sample by sample."""

    def of(row, folder):
        return {key[1:]: ids for key, ids in drawn(folder).items() if key[0] == row}

    for model in ("adapter", "base"):
        assert run(place, model, tmp_path / model, *FEW) == 0
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    assert of("base", whole) == of("base", adapter) == of("base", base)
    assert of("adapter", whole) == of("adapter", adapter) != of("base", whole)


def drawn(folder):
    """Token ids by row, question and sample."""
    found = {}
    for path in sorted(folder.glob("samples/*/words.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            found[path.parent.name, row["question"], row["sample"]] = row["token_ids"]
    return found


def test_a_replica_is_the_row_it_stands_for(place, tmp_path, capsys, monkeypatch):
    """The executor is this process; that Ray deals out the same is the engine's own test."""
    assert run(place, "gated", tmp_path / "one") == 0
    monkeypatch.setattr("loragate.evaluation.prepared.require_ray", lambda: None)

    def here(self, prompts, config, parts):
        engines = [self.make_engine() for _ in range(self.shards)]
        for index, rows in enumerate(parts):
            yield engines[index % self.shards].generate(prompts, config, pending=rows)

    monkeypatch.setattr("loragate.generation.ShardedEngine._drawn", here)
    assert run(place, "gated", tmp_path / "two", "--replicas", "2", "--batch-size", "4") == 0
    one, two = drawn(tmp_path / "one"), drawn(tmp_path / "two")
    assert one == two
    assert len(one) == 6 * 4 * (3 * 4 + 1), "four models at three temperatures and greedily"
    rows = [[ids for (row, *_), ids in one.items() if row == name] for name in ("adapter", "base", "gated")]
    assert rows[0] != rows[1] != rows[2] != rows[0]


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """A finished evaluation of the three rows; a test damages a copy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(place, "gated", folder, *FEW) == 0
    return folder


def require_same(folder, whole):
    rows, expected = (read_record(place / "results.json").results for place in (folder, whole))
    for left, right in zip(rows, expected, strict=True):
        assert (left.label, left.question_scores, left.reasons) == (right.label, right.question_scores, right.reasons)
        assert left.entropy == pytest.approx(right.entropy, rel=1e-5)


def test_a_stopped_evaluation_goes_on(place, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "results.json").unlink()
    kept = folder / "samples" / "gated" / "words.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:10]) + lines[10][:20])  # killed in the middle of a line
    (folder / "samples" / "base" / "words.jsonl").unlink()
    (folder / "grades" / "exact" / "gated" / "words.jsonl").unlink()
    assert run(place, "gated", folder, *FEW, "--resume", "--batch-size", "3") == 0
    require_same(folder, whole)
    assert len(kept.read_text().splitlines()) == 24
    for name in ("questions", "tasks", "samples", "grades"):  # stopped while it began
        shutil.rmtree(folder / name)
    assert run(place, "gated", folder, *FEW, "--resume") == 0
    require_same(folder, whole)


@pytest.mark.slow("kills")
def test_a_killed_evaluation_loses_nothing(place, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "loragate", "eval", "--model", str(place / "gated"), "--out", str(out)]
    command += ["--tasks", str(place / "words.yaml"), "--batch-size", "1", "--samples", "20", "--controls", "none"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    path = out / "samples" / "adapter" / "words.jsonl"
    began = time.monotonic()
    while not (path.exists() and path.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() - began < 120
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = path.read_text().rpartition("\n")[0].splitlines()
    assert len(before) >= 5
    assert main([*command[3:], "--resume"]) == 0
    after = path.read_text().splitlines()
    assert after[: len(before)] == before, "nothing was drawn again"
    keys = [(row["question"], row["sample"]) for row in map(json.loads, after)]
    assert sorted(keys) == [(question, sample) for question in range(6) for sample in range(20)]


def stopped_after(writes, stop):
    """A `SampleWriter` that is stopped after so many batches."""

    class Writer(SampleWriter):
        left = writes

        def write(self, samples):
            if Writer.left == 0:
                stop(self)
            Writer.left -= 1
            super().write(samples)

    return Writer


def fill_the_disk(writer):
    """In the middle of a line; to close the file fails, too."""
    broken = writer._file
    broken.write('{"question": 1, "sam')
    broken.flush()

    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            broken.close()
            raise OSError(errno.ENOSPC, "No space left on device")

    writer._file = Full()


def interrupt(writer):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("stop", "status", "told"), [(fill_the_disk, 1, "disk is full"), (interrupt, 130, "stopped")])
def test_a_full_disk_and_ctrl_c_leave_a_resumable_run(place, whole, tmp_path, capsys, monkeypatch, stop, status, told):
    more = (*FEW, "--batch-size", "6")
    with monkeypatch.context() as patch:
        patch.setattr("loragate.generation.engine.SampleWriter", stopped_after(6, stop))
        assert run(place, "gated", tmp_path / "run", *more) == status
    captured = capsys.readouterr()
    text = " ".join((captured.out + captured.err).split())
    assert "--resume" in text
    assert told in text
    assert run(place, "gated", tmp_path / "run", *more, "--resume") == 0
    require_same(tmp_path / "run", whole)


def test_one_evaluation_at_a_time_writes_to_a_folder(place, tmp_path, fails):
    assert run(place, "gated", tmp_path / "run", *FEW) == 0
    line = ("eval", "--model", place / "gated", "--tasks", place / "words.yaml", "--out", tmp_path / "run", *FEW)
    with file_lock(tmp_path / "run" / "lock", 0.0, "taken"):
        assert "another run is writing to" in fails(*line, "--resume", status=1)


def test_other_weights_in_the_same_folder_are_not_resumed(place, tmp_path, fails):
    """The gates were calibrated anew into the folder that the first answers came from."""
    base = json.loads((place / "gated" / "gate_config.json").read_text())["base"]["id"]
    shutil.copytree(place / "gated", tmp_path / "gated")
    assert run(tmp_path, "gated", tmp_path / "run", *FEW, tasks=place) == 0
    shutil.rmtree(tmp_path / "gated")
    model = shake(lg.attach_gates(tiny_adapter(base=tiny_base()), lg.GateConfig(-3, 2)), 0.25)
    lg.save_gates(model, tmp_path / "gated", adapter_source=place / "adapter", base_id=base)
    line = ("eval", "--model", tmp_path / "gated", "--tasks", place / "words.yaml", "--out", tmp_path / "run")
    assert f"begun with weights.{tmp_path / 'gated'} = " in fails(*line, *FEW, "--resume")


def test_vllm_on_a_cpu_is_given_the_memory_that_is_asked_for_and_heads_that_it_takes(place, monkeypatch):
    """As `serve` does: it would end at the first request."""
    loaded = Loaded(resolve(place / "base"), Loading(trust_remote_code=True), None, None)
    for share in (0.0, 0.8):
        request = make_request(EvalOptions(engine="vllm", vllm_memory=share), "base")
        engines = EngineProvider(request.engine, "base", "", loaded, place)
        told = engines.engine_factory(ModelVariant("base")).keywords
        assert (told["gpu_memory_utilization"], told["trust_remote_code"]) == (share, True)
    monkeypatch.setattr("loragate.serving.vllm_server.unserved_heads", lambda config: f"no {config.model_type}")
    assert load_inputs(EvalOptions(), str(place / "base"), "vllm").kind == "base"
    monkeypatch.setattr("loragate.serving.vllm_server.on_cpu", lambda: True)
    with pytest.raises(lg.errors.ConfigError, match="no qwen2; use --engine transformers"):
        load_inputs(EvalOptions(), str(place / "base"), "vllm")


def test_redrawn_answers_are_judged_anew(place, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    path = folder / "samples" / "base" / "words.jsonl"
    write_rows(path, [{**json.loads(line), "text": "w3"} for line in path.read_text().splitlines()])
    assert run(place, "gated", folder, *FEW, "--resume") == 0
    assert read_record(folder / "results.json").find("words", "base").avg_at_k.mean == 1


def test_a_gold_that_was_mended_is_judged_anew(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    path = folder / "questions" / "words.jsonl"
    answers, grades = open_evaluation(folder).answers(ModelVariant("base"), "words", "exact")
    assert not grades[0].correct
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["gold"] = answers[0].text.strip()
    write_rows(path, rows)
    assert main(["regrade", str(folder)]) == 0
    assert open_evaluation(folder).answers(ModelVariant("base"), "words", "exact")[1][0].correct


def test_verdicts_of_other_limits_are_not_taken_over(place, tmp_path, capsys):
    """Exact comparison has neither limits nor a sandbox; what matters to it is who judged."""
    settings = GradingSettings()
    samples = [Sample(0, 0, "a\u2028b", (1,), "stop", None), Sample(0, 1, "", (1,), "stop", None)]
    grades = [Grade(True, "a\u2028b", "ok"), Grade(False, None, "no_answer")]
    path, task = tmp_path / "grades.jsonl", load_task(str(place / "words.yaml"))
    by = lambda grader, settings: grading_fingerprint(task, [], grader, settings, samples)  # noqa: E731
    for grader in ("exact", "default", "humaneval"):
        write_grades(path, samples, grades, by(grader, settings))
        assert read_grades(path, samples, by(grader, settings)) == read_grades(path, samples) == grades
        slower, lower = replace(settings, timeout=20.0), replace(settings, sandbox="rlimits")
        assert (read_grades(path, samples, by(grader, slower)) is None) == (grader != "exact")
        assert (read_grades(path, samples, by(grader, lower)) is None) == (grader == "humaneval")
    assert read_grades(path, samples[:1]) is None


def test_answers_are_judged_again_without_generating(whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "run")
    path = folder / "grades" / "exact" / "base" / "words.jsonl"
    text = path.read_text()
    assert text.count('"correct": false') > 1
    path.write_text(text.replace('"correct": false', '"correct": true', 1))
    for again, left in (((), 1), (("--again",), 0)):
        assert main(["regrade", str(folder), *again]) == 0
        assert (path.read_text() != text) == left, "verdicts on file are used again"
    (folder / "tasks" / "words.yaml").write_text(TASK.replace("grader: exact", "grader: boxed"))
    assert main(["regrade", str(folder)]) == 0
    again = read_record(folder / "results-regraded.json")
    assert set(again.find("words", "gated").reasons) == {"no_box"}
    assert again.range == (-3, 2)
    assert read_record(folder / "results.json").tasks[0].grader == "exact", "the first record stays"
    # another grader of answers, a pattern, and one whose form no right answer has
    assert main(["regrade", str(folder), "--grader", "regex", "--pattern", r"^(\S+)"]) == 0
    assert read_record(folder / "results-regex.json").tasks[0].grader == r"regex ^(\S+)"
    for given, why in (
        (["--grader", "gsm8k"], "compares numbers"),
        (["--grader", "regex"], "expected one around the answer"),
        (["--pattern", "(a)"], "--pattern has no effect without --grader regex"),
    ):
        assert main(["regrade", str(folder), *given]) in (1, 2)
        assert why in " ".join(capsys.readouterr().err.split())


def test_bad_input(place, tmp_path, fails):
    task = ("--tasks", place / "words.yaml")
    out = tmp_path / "out"
    model = ("--model", place / "gated")
    known = ("eval", *model, *task, "--out", out)
    assert "say what to evaluate" in fails("eval", *model, "--out", out)
    assert "'math500'" in fails("eval", *model, "--out", out, "--tasks", "math50")
    assert "has no effect" in fails(*known, "--grader", "math_verify")
    assert "unknown grader" in fails(*known, "--grader", "mathverify")
    assert "is not among the tasks" in fails(*known, "--data", "wrods=a.jsonl")
    assert "so all 3 samples" in fails(*known, "--temperature", "0", "--samples", "3")
    assert "--samples must be at least 1" in fails(*known, "--samples", "0")
    if importlib.util.find_spec("vllm") is None:
        assert "vLLM is not installed" in fails(*known, "--engine", "vllm")
    retention = fails("eval", *model, "--out", out, "--tasks", "openbookqa", "--samples", "3")
    assert "have no effect: openbookqa" in retention
    (tmp_path / "empty").mkdir()
    assert "of none of the tasks" in fails(*known, "--data", tmp_path / "empty")
    (tmp_path / "up.yaml").write_text(TASK.replace("name: words", "name: ../words"))
    assert "name is '../words'" in fails("eval", *model, "--tasks", tmp_path / "up.yaml", "--out", out)
    (place / "other.yaml").write_text(TASK.replace("version: 3", "version: 4"))
    both = f"{place / 'words.yaml'},{place / 'other.yaml'}"
    assert "rename one of them" in fails("eval", *model, "--tasks", both, "--out", out)
    assert not out.exists(), "nothing is left by a command that was refused"
    missing = fails("eval", *model, "--out", out, "--tasks", "math500")
    assert "--data math500=FILE" in missing
    (tmp_path / "bad.jsonl").write_text('{"question": "w1", "answer": "w3"}\n{"question": "w2"}\n')
    message = fails(*known, "--data", f"words={tmp_path / 'bad.jsonl'}")
    assert "bad.jsonl:2" in message
    out.mkdir()
    (out / "lock").touch()  # of a command that was refused
    assert run(place, "gated", out, "--controls", "none") == 0
    assert "holds an evaluation already" in fails(*known)
    changed = fails(*known, "--controls", "none", "--resume", "--seed", "5")
    assert "seed = 0" in changed
    assert "no evaluation" in fails("eval", *model, *task, "--out", tmp_path / "new", "--resume")
    assert "not the folder of an evaluation" in fails("regrade", tmp_path)


@pytest.mark.slow("whole commands")
def test_every_suite_end_to_end(place, tmp_path, capsys, fails):
    """Every hand-made sample file, the tiny world and the generated arithmetic, for base, adapter and gates by one command."""
    problem = probe_sandbox("bubblewrap")
    if problem and not os.environ.get("LORAGATE_REQUIRE_BWRAP"):
        pytest.skip(f"bubblewrap: {problem}")
    for name in ("math_verify", "lm_eval"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install loragate[eval])")
    command = ["eval", "--model", str(place / "gated"), "--suite", "all", "--data", str(QUESTIONS), "--limit", "4"]
    command += ["--samples", "2", "--max-new-tokens", "6", "--controls", "none", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    record = read_record(tmp_path / "run" / "results.json")
    names = {task.name for task in record.tasks}
    expected = {"math500", "minerva", "olympiadbench", "aime24", "amc23", "humaneval", "humaneval_plus", "mbpp"}
    assert names == expected | {"mmlu_pro", "bbh", "openbookqa", "arithmetic", "tiny", "tiny_retention"}
    assert {row.label for row in record.results} == {"base", "adapter", "gated"}
    assert len(record.results) == 3 * len(names)
    assert record.sandbox == "bubblewrap"
    averaged = {"math": 5, "code": 3, "bbh/subsets": 4, "retention": 3}
    assert {(row.suite, row.average.tasks) for row in record.suites} == set(averaged.items())
    assert len(record.suites) == 3 * len(averaged)
    kept = [tmp_path / "run" / "samples" / row / "openbookqa.jsonl" for row in ("gated", "adapter")]
    assert kept[0].read_text() != kept[1].read_text()
    capsys.readouterr()
    assert main(["regrade", str(tmp_path / "run"), "--grader", "math_verify"]) == 0
    again = read_record(tmp_path / "run" / "results-math_verify.json")
    assert {task.grader for task in again.tasks} >= {"math_verify", "humaneval", "mbpp", "tiny"}
    assert {task.name for task in again.tasks} == names, "retention suites are taken over"
    assert any("subsets have no question" in warning for warning in record.warnings)
    changed = " ".join(command).replace("--limit 4", "--limit 3").split()
    assert "limit = 4" in fails(*changed, "--resume")
