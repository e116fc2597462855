"""The command in this process: files, choice, resuming, and what bad input is answered with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest
from places import arguments, numbers, stamps, sweep

import loragate as lg
from loragate.errors import ConfigError, DivergenceError, LoragateError
from loragate.gates.range import Range
from loragate.report import scores
from loragate.selection import trials
from loragate.selection.selection_run import describe_written_seed
from tiny import VOCABULARY

SLUGS = {f"entropy_{bounds}_seed{seed}" for bounds in ("-3_2", "0_1") for seed in (0, 1)}


def test_a_finished_sweep_is_complete(swept):
    assert {path.name for path in (swept / "trials").iterdir() if path.name != "adapter"} == SLUGS
    selection = json.loads((swept / "selection.json").read_text())
    rows = {row["label"]: row for row in selection["variants"]}
    assert {"gated [-3,2] greedy", "gated [0,1] greedy", "adapter greedy", "base greedy"} <= rows.keys()
    assert selection["dev"]["questions"] == 33
    scores = numbers(swept)["scores"]
    cells = [name for name in scores if name.startswith("gated [") and name.endswith("greedy")]
    for cell in ("[-3,2]", "[0,1]"):
        seeds = [np.mean(scores[f"gated {cell}, seed {seed} greedy"]) for seed in (0, 1)]
        assert rows[f"gated {cell} greedy"]["mean"] == pytest.approx(np.mean(seeds)), "the seeds of a cell are one"
    assert len({tuple(scores[name]) for name in [*cells, "adapter greedy", "base greedy"]}) > 2, "or nothing is shown"
    assert (swept / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert (swept / "heatmap.svg").exists()
    assert "(recommended)" in (swept / "selection.md").read_text()
    config = json.loads((swept / "trials" / "entropy_-3_2_seed1" / "gated" / "gate_config.json").read_text())
    assert (config["training"]["settings"]["seed"], config["training"]["steps"]) == (1, 3)


def test_the_recommended_variant_is_written_and_can_be_loaded(swept):
    record = json.loads((swept / "best" / "gate_config.json").read_text())
    assert record["selection"] == json.loads((swept / "selection.json").read_text())
    found = record["selection"]["recommendation"]
    assert record["sampling"]["temperature"] == found["temperature"]
    assert ("the gates written are those of seed 0" in found["reason"]) == (found["trial"] is not None)
    lg.load_gated(swept / "best")


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([-1e-3], "learning rate: it must be above 0, found -0.001"),
        ([float("nan")], "learning rate"),
        ([1e-3, 0.001], "the learning rate 0.001 is given twice"),
    ],
)
def test_what_is_no_learning_rate(rates, message):
    with pytest.raises(ConfigError, match=message):
        trials.make_trials([Range(0, 1)], ["entropy"], [0], rates)


def test_it_is_said_which_seeds_gates_are_written():
    cell = [trials.Trial(Range(-3, 2), "entropy", seed) for seed in (3407, 42)]
    said = describe_written_seed(cell)
    assert said == "Scores are means over the seeds 3407, 42; the gates written are those of seed 3407."
    assert describe_written_seed(cell[:1]) == describe_written_seed(()) == ""


def test_nothing_finished_runs_again_and_what_is_lost_is_made_again(place, swept, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(swept, tmp_path / "copy")
    (out / "trials" / "entropy_0_1_seed1" / "gated" / "gate_config.json").unlink()
    before, trained, real = stamps(out), [], trials.train_gates

    def counted(model, tokenizer, rows, config, *args, **options):
        trained.append((config.lower, config.upper))
        return real(model, tokenizer, rows, config, *args, **options)

    monkeypatch.setattr(trials, "train_gates", counted)
    assert sweep(arguments(place, out, "--runner", "sequential", "--resume")) == 0
    assert trained == [(0, 1)]
    after = stamps(out)
    assert {slug: after[slug] for slug in before} == before
    assert numbers(out) == numbers(swept)


def test_every_cell_is_a_gated_adapter_and_they_share_the_adapter(place, swept):
    folders = sorted((swept / "trials").glob("*/gated"))
    assert len(folders) == 4
    kept = swept / "trials" / "adapter" / "adapter_model.safetensors"
    for folder in folders:
        model = lg.load_gated(folder)
        assert any(bool(gate.any()) for gate in lg.gate_parameters(model).values())
        assert (folder / "adapter" / "adapter_model.safetensors").samefile(kept)
    assert len({(folder / "gates.safetensors").read_bytes() for folder in folders}) == 4
    assert kept.read_bytes() == (place / "one" / "adapter_model.safetensors").read_bytes()


def test_without_a_dev_set_cells_are_trained_and_none_is_chosen(place, tmp_path, capsys):
    argv = arguments(place, tmp_path / "out", "--runner", "sequential", "--k", "0", ranges="0,1", seeds="0")
    for flag in ("--dev-data", "--dev-grader", "--dev-max-new-tokens", "--dev-samples"):
        if flag == "--dev-samples":
            with pytest.raises(ConfigError, match="--dev-samples has no effect without --dev-data"):
                sweep(argv)
        del argv[argv.index(flag) : argv.index(flag) + 2]
    assert sweep(argv) == 0
    assert f"loragate eval --sweep {tmp_path / 'out'}" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "out/trials/entropy_0_1_seed0/gated/gate_config.json").read_text())
    assert record["k"] == VOCABULARY, "as calibrate records it"
    assert not (tmp_path / "out" / "best").exists()
    assert sweep([*argv, "--resume"]) == 0


def test_learning_rates_are_an_axis_whose_cells_are_compared_apart(place, tmp_path):
    out = tmp_path / "out"
    argv = arguments(place, out, "--runner", "sequential", "--learning-rates", "0.05,1e-3", seeds="0,1")
    del argv[argv.index("--learning-rate") : argv.index("--learning-rate") + 2]
    with pytest.raises(ConfigError, match="--learning-rates: expected numbers separated by commas"):
        sweep([*argv[:-1], "1e-3,x"])
    assert sweep(argv) == 0
    read = lambda path: json.loads(path.read_text())  # noqa: E731
    for rate in (0.05, 0.001):
        for slug in (f"entropy_-3_2_lr{rate:g}_seed0", f"entropy_0_1_lr{rate:g}_seed1"):
            config = read(out / "trials" / slug / "gated" / "gate_config.json")
            assert config["training"]["settings"]["learning_rate"] == rate
    labels = {row["label"] for row in read(out / "selection.json")["variants"]}
    cells = {f"gated {bounds} lr={rate} greedy" for bounds in ("[-3,2]", "[0,1]") for rate in ("0.05", "0.001")}
    assert cells <= labels, "the seeds of a range and rate are one"
    scored = {row["control"]: row["question_scores"] for row in read(out / "dev" / "results.json")["results"]}
    assert scored["[-3,2] lr=0.05, seed 0 greedy"] != scored["[-3,2] lr=0.001, seed 0 greedy"]
    assert {path.name for path in out.glob("heatmap*.png")} == {
        f"heatmap_gated_lr_{rate}_greedy.png" for rate in (0.05, 0.001)
    }
    assert scores.CELL.fullmatch("[-3,2] ce lr=1e-05, seed 0")
    found = trials.make_trials([Range(0, 1)], ["ce"], [3], [1e-5, None])
    assert [(one.name, one.slug) for one in found] == [
        ("[0,1] ce lr=1e-05, seed 3", "ce_0_1_lr1e-05_seed3"),
        ("[0,1] ce, seed 3", "ce_0_1_seed3"),
    ]
    assert [trials.Trial.from_record(one.as_record()) for one in found] == list(found)
    earlier = {key: value for key, value in found[1].as_record().items() if key != "learning_rate"}
    assert trials.Trial.from_record(earlier) == found[1], "sweeps of an earlier version had no such axis"


def test_another_sweep_is_not_resumed(place, swept):
    first = ("--runner", "sequential", "--resume")
    with pytest.raises(ConfigError, match=r"training\.learning_rate = 0.05, now it is 0.01"):
        sweep(arguments(place, swept, *first, "--learning-rate", "0.01"))
    with pytest.raises(ConfigError, match=r"begun with trials"):
        sweep(arguments(place, swept, *first, seeds="0,1,2"))
    with pytest.raises(ConfigError, match="continue it with --resume"):
        sweep(arguments(place, swept, "--runner", "sequential"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--runner", "rey"], 'Did you mean "ray"'),
        (["--seed", "1"], "Unknown option: --seed. Did you mean --seeds"),
        (["--processes", "2"], "Unknown option: --processes"),
        (["--objectives", "entropie"], "did you mean 'entropy'"),
        (["--objectives", "entropy,entropy"], "entropy is given twice"),
        (["--ranges=0,1;0,1"], "twice"),
        (["--ranges=1,0"], "wrong way round"),
        (["--seeds", "0,x"], "whole numbers"),
        (["--seeds", "3,3"], "seed 3 is given twice"),
        (["--seeds", "3,-1"], "seed: it must be at least 0, found -1"),
        (["--learning-rates", "1e-3"], "--learning-rate has no effect with learning_rates 1e-3"),
        (["--dev-data", "nowhere.jsonl"], "found no file"),
        (["--runner", "sequential", "--workers", "4"], "--workers has no effect with runner sequential"),
        (["--granularity", "tokens"], "--granularity"),
        (["--k", "1"], "k must be at least 2"),
        (["--resume"], "no run to resume"),
        (["--dev-grader", "exakt"], "did you mean 'exact'"),
    ],
)
def test_bad_input_is_named_before_anything_is_trained(place, tmp_path, more, message):
    with pytest.raises(LoragateError, match=message):
        sweep(arguments(place, tmp_path / "out", *more))
    assert not (tmp_path / "out" / "trials").exists()


def test_a_folder_that_holds_something_else_is_refused(place, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("x")
    (tmp_path / "full" / "lock").touch()  # of a sweep whose grader was refused
    with pytest.raises(ConfigError, match=r"not empty \(it holds letter.txt\)"):
        sweep(arguments(place, tmp_path / "full"))
    with pytest.raises(ConfigError, match="needs --adapter, --data, --out"):
        sweep(["sweep"])


def test_a_failed_trial_is_told_and_the_others_go_on(place, tmp_path, capsys, monkeypatch):
    real = trials.train_gates

    def sometimes(model, tokenizer, rows, config, *rest, **more):
        if config.lower == -3:
            raise LoragateError("this one does not work")
        return real(model, tokenizer, rows, config, *rest, **more)

    monkeypatch.setattr(trials, "train_gates", sometimes)
    out = tmp_path / "out"
    argv = arguments(place, out, "--runner", "sequential", seeds="0")
    with pytest.raises(LoragateError, match=r"1 of 2 trials are not finished, so nothing was chosen.*--resume"):
        sweep(argv)
    assert "failed: [-3,2], seed 0: this one does not work" in capsys.readouterr().out
    before = stamps(out)
    assert len(before) == 1
    monkeypatch.undo()
    assert sweep([*argv, "--resume"]) == 0
    assert before.items() < stamps(out).items()


def test_a_cell_that_diverged_takes_no_part_and_the_others_are_compared(place, tmp_path, monkeypatch):
    real, tried = trials.train_gates, []

    def sometimes(model, tokenizer, rows, config, settings, **more):
        tried.append((config.lower, settings.seed))
        if (config.lower, settings.seed) == (-3, 1):
            raise DivergenceError("the loss is not finite at step 1")
        return real(model, tokenizer, rows, config, settings, **more)

    monkeypatch.setattr(trials, "train_gates", sometimes)
    out = tmp_path / "out"
    argv = arguments(place, out, "--runner", "sequential")
    assert sweep(argv) == 0
    record = json.loads((out / "selection.json").read_text())
    assert record["diverged"] == {"[-3,2], seed 1": "the loss is not finite at step 1"}
    cells = {row["label"] for row in record["variants"] if row["weights"] == "gates" and not row["temperature"]}
    assert cells == {"gated [0,1] greedy"}, "a cell that lacks a seed is not compared"
    assert "The training of [-3,2], seed 1 diverged and takes no part" in (out / "selection.md").read_text()
    assert len(tried) == 4
    assert sweep([*argv, "--resume"]) == 0
    assert len(tried) == 4, "what diverged would diverge again"


def test_auto_runs_sequentially_where_ray_is_absent(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "loragate.selection.on_ray", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "\.\[sweep\]"'):
        sweep(arguments(place, tmp_path / "out", "--runner", "ray"))
    assert sweep(arguments(place, tmp_path / "out", ranges="0,1", seeds="0")) == 0
    assert capsys.readouterr().out.count("Ray is not installed") == 1


def test_ctrl_c_leaves_a_sweep_that_goes_on(place, tmp_path, monkeypatch):
    out = tmp_path / "out"
    flags = ("--runner", "sequential", "--num-train-epochs", "4", "--save-steps", "0")
    argv = arguments(place, out, *flags, ranges="-3,2", seeds="0")
    real, asked = trials.train_gates, []

    def interrupted(*args, on_step, **options):
        def report(step):
            on_step(step)
            if step.step == 5 and not asked:
                asked.append(True)  # a second Ctrl-C would stop without a checkpoint
                os.kill(os.getpid(), signal.SIGINT)

        return real(*args, on_step=report, **options)

    monkeypatch.setattr(trials, "train_gates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(argv)
    run = out / "trials" / "entropy_-3_2_seed0" / "run"
    assert [path.name for path in run.glob("checkpoint-*")] in (["checkpoint-5"], ["checkpoint-6"])
    monkeypatch.undo()
    assert sweep([*argv, "--resume"]) == 0
    other = tmp_path / "other"
    assert sweep([part if part != str(out) else str(other) for part in argv]) == 0
    assert numbers(out) == numbers(other)
