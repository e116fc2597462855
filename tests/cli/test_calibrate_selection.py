"""`loragate calibrate` choosing its range: the three paths, what is written, what is refused, and resuming after a kill."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_kit import TRAINING, words_task
from safetensors.torch import load_file

import loragate as lg
from loragate.cli.calibrate import CalibrateOptions, candidates_of
from loragate.cli.main import main
from loragate.errors import ConfigError
from loragate.evaluation.results import read_record
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.selection import Chosen, SelectionSettings, trial
from loragate.selection.chosen import headline
from loragate.selection.probe import Probe
from tiny import tiny_base, tiny_rows, tiny_tokenizer, write_adapter, write_base

POOL = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4} w{i + 5} w{i + 6}" for i in range(80)]
GREEDY = ["--probe-grader", "exact", "--probe-temperature", "0", "--probe-max-new-tokens", "1"]
LETTERS = ["--probe-grader", "choice", "--probe-max-new-tokens", "4"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first_words(model):
    """What a model answers greedily to the pool's prompts, one word each; "" where it ends at once."""
    prompts = [f"<user> {prompt} <assistant> " for prompt in POOL]
    samples = TransformersEngine(model, tiny_tokenizer()).generate(prompts, SamplingConfig(0.0, 1.0, 1))
    return [sample.text for sample in samples]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, an adapter, rows, and probes whose labels are the adapter's own words or those of [-3,1]."""
    root = tmp_path_factory.mktemp("selection")
    write_base(root / "base")
    model = write_adapter(root / "adapter", root / "base")
    write(root / "train.jsonl", tiny_rows(20))
    write(root / "many.jsonl", tiny_rows(700, seed=4))
    (root / "words.yaml").write_text(words_task())
    write(root / "heldout.jsonl", tiny_rows(6, seed=11))
    heldout = ("--heldout", root / "heldout.jsonl")
    assert calibrate(root, root / "known", "--range=-3,1", "--unverified", *heldout) == 0
    training = json.loads((root / "known" / "gate_config.json").read_text())["training"]
    assert training["heldout"]["rows"] == 6
    assert training["heldout"]["entropy_before"] != training["entropy_before"]
    words = {"adapter": first_words(model), "gated": first_words(lg.load_gated(root / "known"))}
    asked = [i for i in range(len(POOL)) if words["adapter"][i] and words["gated"][i]][:40]
    assert len(asked) == 40
    assert any(words["adapter"][i] != words["gated"][i] for i in asked), "the test needs gates that change an answer"
    for name, answers in words.items():
        write(root / f"{name}.jsonl", [{"prompt": POOL[i], "answer": answers[i]} for i in asked])
    write(root / "bare.jsonl", [{"prompt": POOL[i]} for i in asked])
    return root


def calibrate(place, out, *more, data="train.jsonl"):
    common = ["calibrate", "--adapter", str(place / "adapter"), "--data", str(place / data), *TRAINING]
    return main([*common, "--out", str(out), *map(str, more)])


def fails(capsys, place, out, *more, status=2, data="train.jsonl"):
    capsys.readouterr()
    assert calibrate(place, out, *more, data=data) == status
    captured = capsys.readouterr()
    assert captured.err.count("loragate: error:") == 1
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


def said(capsys):
    return " ".join(capsys.readouterr().out.split())


def selection_of(folder):
    return json.loads((folder / "gate_config.json").read_text())["selection"]


def is_the_adapter(place, folder):
    """Loads, answers bit for bit as the plain adapter, and generates."""
    ids = torch.arange(5, 25).reshape(2, 10)
    gated = lg.load_gated(folder)
    from peft import PeftModel

    base = tiny_base()
    plain = PeftModel.from_pretrained(base, place / "adapter").eval()
    with torch.no_grad():
        same = torch.equal(gated(input_ids=ids).logits, plain(input_ids=ids).logits)
    return same and main(["generate", "--model", str(folder), "--prompt", "w1", "--max-new-tokens", "2"]) == 0


def test_a_range_is_picked_on_labels(place, tmp_path, capsys):
    out = tmp_path / "gated"
    assert calibrate(place, out, "--probe", place / "gated.jsonl", *GREEDY, "--ranges=0,1;-3,1") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Use ")]
    record = selection_of(out)
    assert record["probe"]["kind"] == "labelled"
    assert record["evidence"]["[-3,1] greedy"]["mean"] == 1.0, "its own answers are the labels"
    assert record["evidence"]["adapter greedy"]["mean"] < 1.0
    assert (record["accepted"], record["picked"]) == (True, "[-3,1]")
    assert record["cost"]["trainings"] == 1
    assert set(record["stopped"]) == {"[0,1]"}
    assert len(lines) == 1
    assert lines[0].startswith("Use the gates [-3,1], greedily: ")
    assert "would have given" in lines[0]
    assert "| [-3,1] greedy | 100.0 |" in (out / "README.md").read_text()
    assert json.loads((out / "generation_config.json").read_text())["do_sample"] is False
    trained = load_file(out / "run" / "candidates" / "trials" / "entropy_-3_1_seed42" / "gated" / "gates.safetensors")
    gates = load_file(out / "gates.safetensors")
    assert all(torch.equal(gates[name], value) for name, value in trained.items())
    assert json.loads((out / "gate_config.json").read_text())["training"]["steps"] == 2
    labels = {row["prompt"]: row["answer"] for row in map(json.loads, (place / "gated.jsonl").read_text().splitlines())}
    base = dict(zip(POOL, first_words(tiny_base()), strict=True))
    (asked,) = [row for row in record["settings"] if row["kind"] == "base"]
    right = [base[prompt] == answer for prompt, answer in labels.items()]
    assert 0 < sum(right) < len(right)
    assert asked["mean"] == pytest.approx(sum(right[: asked["questions"]]) / asked["questions"])


@pytest.mark.parametrize("probe", ["gated.jsonl", "adapter.jsonl"])
def test_the_call_gives_what_the_command_gives(place, tmp_path, probe):
    """Gates byte for byte, and the same record but for seconds; picked on one probe, the adapter on the other."""
    from peft import PeftModel

    command, call = tmp_path / "command" / "gated", tmp_path / "call" / "gated"
    assert calibrate(place, command, "--probe", place / probe, *GREEDY, "--ranges=0,1;-3,1") == 0
    model = PeftModel.from_pretrained(tiny_base(), place / "adapter").eval()
    chosen = lg.calibrate(
        model,
        tiny_tokenizer(),
        str(place / "train.jsonl"),
        str(place / probe),
        call,
        ranges="0,1;-3,1",
        settings=lg.GateTrainingSettings(
            batch_size=10, per_device_train_batch_size=10, max_length=64, k=20, learning_rate=5e-2
        ),
        asking=SelectionSettings(probe_grader="exact", probe_temperature=0.0, probe_max_new_tokens=1),
        adapter_source=place / "adapter",
        base_id=str(place / "base"),
    )
    assert (chosen.candidate is None) is (probe == "adapter.jsonl")
    assert (command / "gates.safetensors").read_bytes() == (call / "gates.safetensors").read_bytes()
    left, right = (without_seconds(json.loads((folder / "gate_config.json").read_text())) for folder in (command, call))
    assert left == right
    assert {path.name for path in command.iterdir()} == {path.name for path in call.iterdir()}
    assert all(
        torch.equal(value, lg.gate_parameters(model)[name])
        for name, value in load_file(call / "gates.safetensors").items()
    )


def without_seconds(record):
    if isinstance(record, dict):
        return {name: without_seconds(value) for name, value in record.items() if "seconds" not in name}
    return record


def test_the_adapter_stays_where_nothing_beats_it(place, tmp_path, capsys):
    out = tmp_path / "gated"
    assert calibrate(place, out, "--probe", place / "adapter.jsonl", *GREEDY, "--range=-3,1") == 0
    text = said(capsys)
    assert re.search(r"Use the adapter alone, greedily: 9\d\.\d %; the gates would have given", text)
    assert "nothing is probably better than the adapter" in text
    record = selection_of(out)
    assert (record["accepted"], record["picked"]) == (False, "adapter")
    assert record["evidence"]["adapter greedy"]["mean"] == 1.0
    assert is_the_adapter(place, out)
    card = (out / "README.md").read_text()
    assert "gates that are off" in card
    assert "nothing beat the adapter" in card
    capsys.readouterr()
    write(place / "words.jsonl", [{"prompt": f"w{i}", "answer": "w3"} for i in range(3)])
    run = ["eval", "--model", str(out), "--tasks", str(place / "words.yaml"), "--controls", "none"]
    assert main([*run, "--out", str(tmp_path / "run")]) == 0
    text = said(capsys)
    assert "the gates of" in text
    assert "are off: nothing beat the adapter" in text
    results = read_record(tmp_path / "run" / "results.json")
    assert [row.name for row in results.results] == ["adapter", "base", "adapter greedy"], "as the folder recommends"
    assert results.models["adapter"] == str(out / "adapter")


def test_gates_that_act_are_scored_as_gates_whatever_the_record_says(place, tmp_path):
    from loragate.models import resolve

    known = resolve(place / "known")
    assert known.gates_off == ""
    assert resolve(place / "adapter").gates_off == ""
    config = json.loads((place / "known" / "gate_config.json").read_text())
    config["selection"]["accepted"] = False
    shutil.copytree(place / "known", tmp_path / "said")
    (tmp_path / "said" / "gate_config.json").write_text(json.dumps(config))
    assert resolve(tmp_path / "said").gates_off == ""


def test_a_probe_without_labels_is_judged_by_agreement(place, tmp_path, capsys):
    out = tmp_path / "gated"
    assert calibrate(place, out, "--probe", place / "bare.jsonl", *GREEDY, "--ranges=-3,1") == 0
    record = selection_of(out)
    assert record["probe"]["kind"] == "agreement"
    assert record["probe"]["questions"] >= 32
    assert 0 < record["probe"]["majority_share"] <= 1
    text = said(capsys)
    assert "the adapter's own majority" in text
    assert "it cannot compare temperatures" in text
    assert {row["kind"] for row in record["settings"]} == {"adapter", "gates"}
    assert "without labels" in (out / "README.md").read_text()


def test_without_a_probe_prompts_are_set_aside(place, tmp_path, capsys):
    out = tmp_path / "gated"
    assert calibrate(place, out, *GREEDY, "--ranges=0,1", "--max-rows", "20", data="many.jsonl") == 0
    record = selection_of(out)
    assert record["probe"]["kind"] == "agreement"
    assert record["probe"]["source"].startswith("64 rows of")
    assert "20 rows" in said(capsys)


def test_without_evidence_nothing_is_trained(place, tmp_path, capsys):
    out = tmp_path / "gates"
    assert calibrate(place, out, *LETTERS, "--max-rows", "20", "--ranges=-6,3;0,6", data="many.jsonl") == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "only 0 % of the adapter's samples" in text, "no letter can be read from random words"
    assert "--probe FILE" in text
    assert "--unverified" in text
    assert not (out / "gate_config.json").exists()
    assert not list(out.rglob("trials")), "no range was begun"
    more = ("--range=0,1", "--unverified", "--max-rows", "20")
    assert calibrate(place, out, *more, data="many.jsonl") == 0, "what was advised works in the same folder"
    assert selection_of(out)["accepted"] is True


def test_flags_that_would_be_ignored_are_refused(place, tmp_path, capsys):
    probe, given = ("--probe", place / "adapter.jsonl"), ("--range=0,1", "--unverified")
    cases = [
        (("--range=0,1",), "nothing would show that --range=0,1 helps"),
        (("--range=0,1",), "accept the gates as they come with --unverified"),
        (("--range=1,-3", "--unverified"), "wrong way round"),
        (("--range=a,b", "--unverified"), "two numbers"),
        (("--unverified",), "--unverified accepts one range"),
        ((*given, *probe), "leave out one of --unverified and --probe"),
        ((*given, "--probe-samples", "2"), "--probe-samples has no effect"),
        ((*given, "--retention-probe", "x"), "--retention-probe has no effect"),
        ((*probe, "--range=0,1", "--ranges=0,2"), "--ranges has no effect"),
        ((*probe, "--ranges=0,1;0,1"), "stands there twice"),
        ((*probe, "--ranges=0,1@anchord"), "did you mean 'anchored'"),
        (("--probe-task", "math500"), "--probe-task has no effect"),
        (("--retention-task", "math500"), "--retention-task has no effect"),
        (("--exclude", "x.jsonl"), "--exclude has no effect"),
        (
            (*probe, "--objective", "anchored", "--beta", "0.5", "--ranges=0,1@entropy"),
            "beta has no effect with objective entropy",
        ),
        ((*probe, "--probe-task", "math500", "--probe-grader", "exact"), "--probe-grader has no effect"),
        ((*probe, "--no-guard"), "--guard has no effect"),
        ((*probe, "--probe-temperature", "-1"), "at least 0"),
        ((*given, "--probe-samples", "2"), "has no effect with --unverified; leave it out"),
        (("--range=0,1@ecntropy", "--unverified"), "error: the range 0,1@ecntropy has the unknown objective"),
    ]
    for flags, words in cases:
        assert words in fails(capsys, place, tmp_path / "out", *flags), flags
    assert not (tmp_path / "out").exists()


def test_a_reward_and_a_plain_retention_probe_read_the_grader():
    (one,) = candidates_of(CalibrateOptions(range="0,1@reward", unverified=True, probe_grader="exact"))
    assert one.objective == "reward"
    asked = CalibrateOptions(probe="p", probe_task="math500", retention_probe="r", probe_grader="exact")
    assert candidates_of(asked)
    with pytest.raises(ConfigError, match="--probe-grader has no effect"):
        candidates_of(replace(asked, retention_task="math500"))


def test_ctrl_c_says_the_step_and_how_to_go_on(place, tmp_path, capsys, monkeypatch):
    train, sent = trial.calibrate, []

    def interrupted(*args, on_step, **options):
        def report(step):
            on_step(step)
            if not sent:
                sent.append(step)
                os.kill(os.getpid(), signal.SIGINT)

        return train(*args, on_step=report, **options)

    monkeypatch.setattr(trial, "calibrate", interrupted)
    probe = (
        "--probe",
        place / "gated.jsonl",
        *GREEDY,
        "--ranges=-3,1",
        "--num-train-epochs",
        "3",
        "--logging-steps",
        "1",
    )
    assert calibrate(place, tmp_path / "out", *probe) == 130
    assert "stopped by Ctrl-C at step 2 of 6; run the same command with --resume" in said(capsys)
    monkeypatch.setattr(trial, "calibrate", train)
    score = Probe.score

    def cut_off(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Probe, "score", cut_off)
    assert calibrate(place, tmp_path / "out", *probe, "--resume") == 130
    assert "the same command with --resume goes on" in said(capsys)
    monkeypatch.setattr(Probe, "score", score)
    assert calibrate(place, tmp_path / "out", *probe, "--resume") == 0
    record = selection_of(tmp_path / "out")
    assert (record["cost"]["trainings"], max(row["questions"] for row in record["settings"])) == (1, 40)


def test_several_processes_are_refused_before_anything_is_loaded(place, tmp_path, capsys, monkeypatch):
    probe = ("--probe", place / "adapter.jsonl")
    message = fails(capsys, place, tmp_path / "out", *probe, "--strategy", "ddp", "--processes", "3")
    assert "chosen in one process, not in 3" in message, "and no launcher was started"
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = fails(capsys, place, tmp_path / "out", "--probe", place / "adapter.jsonl")
    assert "chosen in one process, not in 2" in message
    assert not (tmp_path / "out").exists()


def test_probes_that_show_nothing_are_refused(place, tmp_path, capsys):
    rows = [json.loads(line) for line in (place / "adapter.jsonl").read_text().splitlines()]
    trained = json.loads((place / "train.jsonl").read_text().splitlines()[6])["messages"][0]["content"]
    leaking = write(tmp_path / "leaking.jsonl", [*rows[:33], {"prompt": trained.upper(), "answer": "w1"}])
    message = fails(capsys, place, tmp_path / "out", "--probe", leaking, *GREEDY, status=1)
    assert "leaking.jsonl:34: 1 of 34 probe questions are also among the training rows" in message
    evaluation = write(tmp_path / "test.jsonl", [{"question": "w5 w6"}, {"question": f" {rows[2]['prompt']} "}])
    flags = ("--probe", place / "adapter.jsonl", *GREEDY, "--exclude", evaluation)
    assert "adapter.jsonl:3: 1 of 40" in fails(capsys, place, tmp_path / "out", *flags, status=1)
    unknown = write(tmp_path / "unknown.jsonl", [{"text": "w5 w6"}])
    flags = (*flags[:-1], unknown)
    assert "no prompts were found in the rows of" in fails(capsys, place, tmp_path / "out", *flags, status=1)
    few = write(tmp_path / "few.jsonl", rows[:31])
    assert "31 different questions" in fails(capsys, place, tmp_path / "few", "--probe", few, *GREEDY, status=1)
    flags = ("--probe", place / "adapter.jsonl", *GREEDY, "--retention-probe", place / "bare.jsonl")
    assert "has no answers" in fails(capsys, place, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow("kills")
def test_a_killed_selection_goes_on(place, tmp_path):
    out = tmp_path / "gated"
    probe = ["--probe", str(place / "gated.jsonl"), *GREEDY]
    command = [*("calibrate", "--adapter", str(place / "adapter"), "--data", str(place / "train.jsonl")), *TRAINING]
    command += ["--out", str(out), *probe]
    process = subprocess.Popen(
        [sys.executable, "-m", "loragate", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    first = out / "run" / "candidates" / "trials" / "entropy_0_1_seed42" / "trained.json"
    began = time.monotonic()
    while not first.is_file():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() - began < 120
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "gate_config.json").exists()
    finished = {
        path: path.stat().st_mtime_ns for path in Path(out / "run" / "candidates" / "trials").glob("*/trained.json")
    }
    assert main(command) != 0, "an unfinished selection is not begun again by accident"
    assert main([*command, "--resume"]) == 0
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items()), "nothing was done again"
    whole = tmp_path / "whole"
    assert calibrate(place, whole, *probe) == 0
    left, right = selection_of(out), selection_of(whole)
    assert (left["picked"], left["evidence"], left["signs"]) == (right["picked"], right["evidence"], right["signs"])
    for name, value in load_file(whole / "gates.safetensors").items():
        assert torch.equal(load_file(out / "gates.safetensors")[name], value)


SCORE = {"mean": 0.5, "low": 0.4, "high": 0.6}
STEPS = [
    {"kind": "base", "against": "adapter", "mean": -0.1, "low": -0.2, "high": 0.0, "taken": False},
    {"kind": "gates", "against": "adapter", "mean": 0.05, "low": -0.02, "high": 0.12, "taken": False},
]


def recorded(kind="adapter", picked="adapter", temperature=0.0, steps=STEPS, questions=200):
    """The record of a comparison, as far as it is printed."""
    name = f"{picked} T={temperature:g}" if temperature else f"{picked} greedy"
    scores = {"adapter": {"mean": 0.4}, "base": {"mean": 0.3}, "constant": {"mean": 0.42}, "gates": {"mean": 0.45}}
    return {
        "probe": {"kind": "labelled", "questions": questions, "samples": 4},
        "recommendation": {
            "kind": kind,
            "setting": name,
            "temperature": temperature,
            "steps": steps,
            "level": 0.9,
            "expected": scores,
            "tried": 40,
        },
        "cost": {"answers": 2400},
        "evidence": {name: SCORE},
        "signs": {name: {"finished": 1.0, "tokens": 9.0}},
        "picked": picked,
        "accepted": kind != "adapter",
        "warnings": {},
        "vetoed": {},
    }


def test_the_first_line_says_what_to_use_and_what_the_other_way_would_have_given():
    assert headline(recorded()) == (
        "Use the adapter alone, greedily: 40.0 %; the gates would have given 45.0 % (+5.0 points, 90 % interval -2.0 to +12.0)."
    )
    shown = [{**STEPS[1], "low": 0.01, "against": "constant", "taken": True}]
    assert headline(recorded("gates", "[0,6]", 0.3, shown)) == (
        "Use the gates [0,6], at T = 0.3: 45.0 %; one λ for all modules would have given 42.0 % "
        "(+5.0 points for the gates, 90 % interval +1.0 to +12.0)."
    )
    assert headline(recorded("base", "base", 0.3, STEPS[:1])) == "Use the base without the adapter, at T = 0.3: 30.0 %."


def sentences(**more):
    return Chosen(Path("gated"), None, {"selection": {**recorded(), **more}}).sentences()


def test_a_range_that_dropped_out_is_named_with_its_reason():
    lines = sentences()
    assert lines[0].startswith("Use the adapter alone")
    assert not any("drops out" in line for line in lines)
    stopped = {"[0,6]": {"steps": 49, "score": 0.31, "weakest_kept": 0.4}}
    lines = sentences(failed={"[-6,3]": "the loss is not finite at step 4"}, stopped=stopped)
    assert "[-6,3] could not be trained and drops out: the loss is not finite at step 4" in lines
    assert "[0,6] was stopped after 49 steps: 31.0 % then, the others at least 40.0 %" in lines


@pytest.mark.parametrize("nothing", [False, True])
def test_what_own_answers_can_teach_is_said_of_the_temperature_with_most_questions(nothing):
    few = {"temperature": 1.0, "mean": 0.5, "low": 0.1, "high": 0.9, "questions": 4, "samples": 4}
    many = {"temperature": 0.3, "mean": 0.02, "low": 0.0, "high": 0.08, "questions": 90, "samples": 4}
    (line,) = [
        line
        for line in sentences(own_answers={"sampled": [few, many], "nothing_to_learn": nothing})
        if "wrongly" in line
    ]
    assert line.startswith("of 90 questions")
    assert "2.0 % have a right answer among 4 sampled at T = 0.3 (95 % interval 0.0 to 8.0 %)" in line
    assert ("nothing to learn" in line) is nothing
    assert not any("wrongly" in line for line in sentences(own_answers={"sampled": [], "nothing_to_learn": False}))


def test_a_gain_on_untouched_questions_is_the_one_that_is_said():
    taken = [{**STEPS[1], "taken": True}]
    gain = {
        "questions": 256,
        "setting": "[0,6] T=0.3",
        "against": "adapter greedy",
        "difference": {"mean": 0.04, "low": 0.01, "high": 0.07},
        "confirmed": True,
    }
    assert headline({**recorded("gates", "[0,6]", 0.3, taken), "confirmation": gain}) == (
        "Use the gates [0,6], at T = 0.3: 45.0 %; +4.0 points more than adapter greedy on 256 questions that chose nothing "
        "(95 % interval +1.0 to +7.0)."
    )
    lost = {**gain, "difference": {"mean": -0.01, "low": -0.04, "high": 0.02}, "confirmed": False}
    assert "[0,6] T=0.3 gained -1.0 points" in headline({**recorded(steps=taken), "confirmation": lost})
    said = headline({**recorded(), "confirmation": {**gain, "setting": "λ=0.5 greedy"}})
    assert "on 256 questions that chose nothing" in said
    assert "; the gates would have given" in said, "what was confirmed is no word about the gates"
