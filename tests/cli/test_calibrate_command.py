"""`loragate calibrate`: what it recommends, writes and says, what is refused, and resuming after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from command_kit import TRAINING, words_task
from safetensors.torch import load_file

import loragate as lg
from loragate.cli.main import main
from loragate.evaluation.results import read_record
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.selection import DevSettings, trials
from tiny import tiny_base, tiny_rows, tiny_tokenizer, write_adapter, write_base

POOL = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4} w{i + 5} w{i + 6}" for i in range(80)]
ONE_WORD = ["--dev-grader", "exact", "--dev-max-new-tokens", "1"]


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
    """A base, an adapter, examples, and dev sets whose answers are the adapter's own words or those of [-3,1]."""
    root = tmp_path_factory.mktemp("selection")
    write_base(root / "base")
    model = write_adapter(root / "adapter", root / "base")
    write(root / "train.jsonl", tiny_rows(20))
    (root / "words.yaml").write_text(words_task())
    write(root / "heldout.jsonl", tiny_rows(6, seed=11))
    (root / "heldout.yaml").write_text(f"eval_data: {root / 'heldout.jsonl'}\n")
    known = ("--ranges=-3,1", "--skip-selection", "--config", root / "heldout.yaml")
    assert calibrate(root, root / "known", *known) == 0
    training = json.loads((root / "known" / "gate_config.json").read_text())["training"]
    assert training["heldout"]["rows"] == 6
    assert training["heldout"]["entropy_before"] != training["entropy_before"]
    words = {"adapter": first_words(model), "gated": first_words(lg.load_gated(root / "known"))}
    asked = [i for i in range(len(POOL)) if words["adapter"][i] and words["gated"][i]][:40]
    assert len(asked) == 40
    assert sum(words["adapter"][i] != words["gated"][i] for i in asked) > 4, "the test needs gates that change answers"
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


def test_gates_are_recommended_where_they_answer_better(place, tmp_path, capsys):
    out = tmp_path / "gated"
    assert calibrate(place, out, "--dev-data", place / "gated.jsonl", *ONE_WORD, "--ranges=0,1;-3,1") == 0
    lines = capsys.readouterr().out.splitlines()
    record = selection_of(out)
    rows = {row["label"]: row for row in record["variants"]}
    assert rows["gated [-3,1] greedy"]["mean"] == 1.0, "its own answers are the labels"
    assert rows["adapter greedy"]["mean"] < 1.0
    assert record["recommendation"]["label"] == "gated [-3,1] greedy"
    assert [line.startswith("Use the gates [-3,1], greedily: 100.0 %") for line in lines if "Use " in line] == [True]
    assert any("every kind of question" in line for line in lines)
    assert any("fewer than 128: differences of several points may be chance" in line for line in lines)
    assert json.loads((out / "generation_config.json").read_text())["do_sample"] is False
    trained = load_file(out / "run" / "trials" / "entropy_-3_1_seed42" / "gated" / "gates.safetensors")
    gates = load_file(out / "gates.safetensors")
    assert all(torch.equal(gates[name], value) for name, value in trained.items())
    labels = {row["prompt"]: row["answer"] for row in map(json.loads, (place / "gated.jsonl").read_text().splitlines())}
    base = dict(zip(POOL, first_words(tiny_base()), strict=True))
    right = [base[prompt] == answer for prompt, answer in labels.items()]
    assert rows["base greedy"]["mean"] == pytest.approx(sum(right) / len(right))
    record = read_record(out / "run" / "dev" / "results.json")
    assert record.find("dev", "gated", "[-3,1] greedy").avg_at_k.mean == 1.0, (
        "the dev set is an evaluation like any other"
    )
    assert main(["generate", "--model", str(out), "--prompt", "w1", "--max-new-tokens", "2"]) == 0


def test_the_call_gives_what_the_command_gives(place, tmp_path):
    """Gates byte for byte, and the same record but for seconds."""
    from peft import PeftModel

    command, call = tmp_path / "command" / "gated", tmp_path / "call" / "gated"
    assert calibrate(place, command, "--dev-data", place / "gated.jsonl", *ONE_WORD, "--ranges=0,1;-3,1") == 0
    model = PeftModel.from_pretrained(tiny_base(), place / "adapter").eval()
    lg.calibrate(
        model,
        tiny_tokenizer(),
        str(place / "train.jsonl"),
        str(place / "gated.jsonl"),
        call,
        ranges="0,1;-3,1",
        settings=lg.GateTrainingSettings(
            batch_size=10, per_device_train_batch_size=10, max_length=64, k=20, learning_rate=5e-2
        ),
        dev=DevSettings(dev_grader="exact", dev_max_new_tokens=1),
        adapter_source=place / "adapter",
        base_id=str(place / "base"),
    )
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
    assert calibrate(place, out, "--dev-data", place / "adapter.jsonl", *ONE_WORD, "--ranges=-3,1") == 0
    assert "Use the adapter alone, greedily: 100.0 %" in said(capsys)
    assert selection_of(out)["recommendation"]["label"] == "adapter greedy"
    assert is_the_adapter(place, out)
    capsys.readouterr()
    write(place / "words.jsonl", [{"prompt": f"w{i}", "answer": "w3"} for i in range(3)])
    run = ["eval", "--model", str(out), "--tasks", str(place / "words.yaml"), "--controls", "none"]
    assert main([*run, "--out", str(tmp_path / "run")]) == 0
    assert "the gates of" in said(capsys)
    results = read_record(tmp_path / "run" / "results.json")
    assert [row.label for row in results.results] == [
        "adapter",
        "base",
        "adapter greedy",
        "base greedy",
    ], "as the folder recommends"
    assert results.models["adapter"] == str(out / "adapter")


def test_gates_that_act_are_scored_as_gates_whatever_the_record_says(place, tmp_path):
    from loragate.models import resolve

    known = resolve(place / "known")
    assert known.inactive_gates_reason == ""
    assert resolve(place / "adapter").inactive_gates_reason == ""
    config = json.loads((place / "known" / "gate_config.json").read_text())
    config["selection"]["recommendation"] = {"weights": "adapter"}
    shutil.copytree(place / "known", tmp_path / "said")
    (tmp_path / "said" / "gate_config.json").write_text(json.dumps(config))
    assert resolve(tmp_path / "said").inactive_gates_reason == ""


def test_flags_that_would_be_ignored_or_show_nothing_are_refused(place, tmp_path, capsys):
    dev, given = ("--dev-data", place / "adapter.jsonl"), ("--ranges=0,1", "--skip-selection")
    cases = [
        (("--ranges=0,1",), "use it as it is, decoded greedily"),
        (("--dev-data", place / "bare.jsonl"), "has no answers"),
        (("--ranges=1,-3", "--skip-selection"), "wrong way round"),
        (("--skip-selection",), "--skip-selection takes the gates of one range"),
        ((*given, *dev), "without a dev set"),
        ((*given, "--dev-samples", "2"), "--dev-samples has no effect"),
        ((*dev, "--ranges=0,1;0,1"), "twice"),
        ((*given, "--exclude", "x.jsonl"), "--exclude has no effect"),
        ((*dev, "--dev-task", "math500", "--dev-grader", "exact"), "--dev-grader has no effect"),
        ((*dev, "--strategy", "ddp", "--processes", "3"), "chosen in one process, not in 3"),
    ]
    for flags, words in cases:
        assert words in fails(capsys, place, tmp_path / "out", *flags), flags
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_the_step_and_how_to_go_on(place, tmp_path, capsys, monkeypatch):
    train, sent = trials.train_gates, []

    def interrupted(*args, on_step, **options):
        def report(step):
            on_step(step)
            if not sent:
                sent.append(step)
                os.kill(os.getpid(), signal.SIGINT)

        return train(*args, on_step=report, **options)

    monkeypatch.setattr(trials, "train_gates", interrupted)
    dev = ("--dev-data", place / "gated.jsonl", *ONE_WORD, "--ranges=-3,1")
    (tmp_path / "often.yaml").write_text("logging_steps: 1\n")
    more = ("--num-train-epochs", "3", "--config", tmp_path / "often.yaml")
    assert calibrate(place, tmp_path / "out", *dev, *more) == 130
    assert "stopped by Ctrl-C at step 2 of 6; run the same command with --resume" in said(capsys)
    monkeypatch.undo()
    assert calibrate(place, tmp_path / "out", *dev, *more, "--resume") == 0
    assert calibrate(place, tmp_path / "whole", *dev, *more) == 0
    assert selection_of(tmp_path / "out") == selection_of(tmp_path / "whole")


def test_sigterm_while_the_dev_set_is_asked_says_how_to_go_on(place, tmp_path, capsys, monkeypatch):
    def asked(options, *given):
        (tmp_path / "out" / "run").mkdir(parents=True)
        raise KeyboardInterrupt("SIGTERM")

    monkeypatch.setattr("loragate.cli.calibrate.run_selection", asked)
    assert calibrate(place, tmp_path / "out", "--dev-data", place / "gated.jsonl", *ONE_WORD) == 130
    heard = capsys.readouterr()
    assert "stopped; the same command with --resume goes on in" in heard.out
    assert "stopped by SIGTERM; what was finished is kept" in heard.err


@pytest.mark.slow("kills")
def test_a_killed_calibration_goes_on(place, tmp_path):
    out = tmp_path / "gated"
    dev = ["--dev-data", str(place / "gated.jsonl"), *ONE_WORD]
    command = [*("calibrate", "--adapter", str(place / "adapter"), "--data", str(place / "train.jsonl")), *TRAINING]
    command += ["--out", str(out), *dev]
    process = subprocess.Popen(
        [sys.executable, "-m", "loragate", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    first = out / "run" / "trials" / "entropy_0_1_seed42" / "gated" / "gate_config.json"
    began = time.monotonic()
    while not first.is_file():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() - began < 300
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "gate_config.json").exists()
    kept = first.stat().st_mtime_ns
    assert main(command) != 0, "an unfinished run is not begun again by accident"
    assert main([*command, "--resume"]) == 0
    assert first.stat().st_mtime_ns == kept, "nothing was done again"
    whole = tmp_path / "whole"
    assert calibrate(place, whole, *dev) == 0
    assert selection_of(out) == selection_of(whole)
    for name, value in load_file(whole / "gates.safetensors").items():
        assert torch.equal(load_file(out / "gates.safetensors")[name], value)
