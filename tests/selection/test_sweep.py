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
from loragate.cli.arguments import parse
from loragate.cli.sweep import COMMAND, prepare
from loragate.errors import ConfigError, DivergenceError, LoragateError
from loragate.selection.sweep import open_bench
from tiny import VOCABULARY, write_rows


def test_a_finished_sweep_is_complete(swept):
    assert {path.name for path in (swept / "trials").iterdir()} == {
        "one_untouched",
        *(f"one_entropy_{bounds}_seed{seed}" for bounds in ("-3_2", "0_1") for seed in (0, 1)),
    }
    found = numbers(swept)
    assert len(found) == 5
    scores = [np.array(record["probe"]["scores"]) for record in found.values()]
    assert all(table.shape == (33, 2) for table in scores)
    assert len({table.tobytes() for table in scores}) > 2, "the cells must differ, or the tests show nothing"
    assert len({record["probe"]["answers_sha256"] for record in found.values()}) == 5
    assert 0 < found["one_untouched"]["probe"]["scores"].count([1.0, 1.0]) < 33
    assert found["one_untouched"]["training"] == {}
    trained = found["one_entropy_-3_2_seed0"]
    assert trained["training"]["steps"] == 3
    assert trained["training"]["settings"]["seed"] == 0
    assert len(trained["gates"]) == 14
    assert found["one_entropy_-3_2_seed1"]["training"]["settings"]["seed"] == 1
    summary = json.loads((swept / "sweep_results.json").read_text())
    assert [cell["seeds"] for cell in summary["cells"]] == [[0, 1], [0, 1]]
    assert (swept / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert (swept / "heatmap.svg").exists()


def test_the_probe_is_asked_as_calibrate_asks_it(place, tmp_path):
    """Plain rows are asked as plain text, and an answer takes what the rows' responses need."""
    plain = [{"prompt": f"w{i} w{i + 1}", "completion": "w5"} for i in range(40)]
    write_rows(tmp_path / "plain.jsonl", plain)
    given = arguments(place, tmp_path / "out", "--data", str(tmp_path / "plain.jsonl"), "--probe-max-new-tokens", "0")
    probe = open_bench(prepare(parse(COMMAND, given[1:])[0])[0]).probe
    assert probe.task.raw
    assert not any(prompt.startswith("<user>") for prompt in probe.prompts)
    assert probe.sampling.max_new_tokens == 32


def test_nothing_finished_runs_again_and_what_is_lost_is_made_again(place, swept, tmp_path, capsys, monkeypatch):
    from loragate.selection import sweep as module

    real, loads = module.open_base, []
    monkeypatch.setattr(module, "open_base", lambda *given: loads.append(given) or real(*given))
    out = tmp_path / "copy"
    shutil.copytree(swept, out)
    lost = out / "trials" / "one_entropy_0_1_seed1"
    (lost / "result.json").unlink()
    (out / "trials" / "one_entropy_0_1_seed0" / "result.json").write_text("{torn")
    before = stamps(out)
    again = arguments(place, out, "--runner", "sequential", "--resume")
    assert sweep(again) == 0
    assert "5 trials, 3 of them finished before" in capsys.readouterr().out
    assert len(loads) == 1, "both trials work on one base"
    after = stamps(out)
    kept = set(before) - {"one_entropy_0_1_seed0"}
    assert {slug: after[slug] for slug in kept} == {slug: before[slug] for slug in kept}
    assert numbers(out) == numbers(swept)


def test_every_cell_is_a_gated_adapter_and_they_share_the_adapter(place, swept):
    folders = sorted((swept / "trials").glob("*/gated"))
    assert len(folders) == 4
    kept = swept / "adapters" / "one" / "adapter_model.safetensors"
    for folder in folders:
        model = lg.load_gated(folder)
        assert any(bool(gate.any()) for gate in lg.gate_parameters(model).values())
        assert (folder / "adapter" / "adapter_model.safetensors").samefile(kept)
        assert (folder / "adapter" / "tokenizer" / "tokenizer.json").stat().st_nlink == 5
    assert len({(folder / "gates.safetensors").read_bytes() for folder in folders}) == 4
    assert kept.read_bytes() == (place / "one" / "adapter_model.safetensors").read_bytes()


def test_without_a_probe_cells_are_trained_and_none_is_chosen(place, tmp_path, capsys):
    argv = arguments(place, tmp_path / "out", "--runner", "sequential", "--k", "0", ranges="0,1", seeds="0")
    for flag in ("--probe", "--probe-grader", "--probe-max-new-tokens", "--probe-temperature", "--probe-samples"):
        if flag == "--probe-samples":
            with pytest.raises(ConfigError, match="--probe-samples has no effect without --probe"):
                sweep(argv)
        del argv[argv.index(flag) : argv.index(flag) + 2]
    assert sweep(argv) == 0
    assert f"loragate eval --sweep {tmp_path / 'out'}" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "out/trials/one_entropy_0_1_seed0/gated/gate_config.json").read_text())
    assert record["k"] == VOCABULARY, "as calibrate records it"
    assert not (tmp_path / "out" / "best").exists()
    assert sweep([*argv, "--resume"]) == 0


def test_another_sweep_is_not_resumed(place, swept):
    first = ("--runner", "sequential", "--resume")
    with pytest.raises(ConfigError, match=r"training\.entropy\.learning_rate = 0.05, now it is 0.01"):
        sweep(arguments(place, swept, *first, "--learning-rate", "0.01"))
    with pytest.raises(ConfigError, match=r"trials\."):
        sweep(arguments(place, swept, *first, seeds="0,1,2"))
    with pytest.raises(ConfigError, match="go on with --resume"):
        sweep(arguments(place, swept, "--runner", "sequential"))


def test_the_best_cell_is_written_and_can_be_loaded(place, swept, tmp_path, capsys):
    from loragate.generation import SamplingConfig, TransformersEngine
    from loragate.selection.store import Store
    from loragate.selection.trial import copy_artifact
    from tiny import tiny_tokenizer

    store = Store.open(swept)
    one = next(one for one in store.study.candidates if one.slug == "one_entropy_-3_2_seed0")
    copy_artifact(store.place(one) / "gated", tmp_path / "gates", {"method": "sweep"})
    kept = json.loads((tmp_path / "gates" / "gate_config.json").read_text())
    assert (kept["k"], kept["selection"], kept["gate"]["lower"]) == (20, {"method": "sweep"}, -3)
    assert kept["training"]["steps"] > 0
    model = lg.load_gated(tmp_path / "gates")
    rows = [json.loads(line) for line in (place / "probe.jsonl").read_text().splitlines()]
    prompts = [f"<user> {row['prompt']} <assistant> " for row in rows]
    samples = TransformersEngine(model, tiny_tokenizer()).generate(prompts, SamplingConfig(0.0, max_new_tokens=1))
    lines = [
        json.dumps({"prompt": row["prompt"], "answer": s.text or "w1"}) for row, s in zip(rows, samples, strict=True)
    ]
    probe = tmp_path / "probe.jsonl"
    probe.write_text("\n".join(lines) + "\n")

    out = tmp_path / "sweep"
    argv = arguments(place, out, "--runner", "sequential", ranges="-3,2", seeds="0")
    argv[argv.index("--probe") + 1] = str(probe)
    assert sweep(argv) == 0
    text = capsys.readouterr().out
    assert "Use [-3,2]" in text
    assert f"next: loragate eval --model {out / 'best'}" in text
    record = json.loads((out / "best" / "gate_config.json").read_text())
    assert record["sampling"] == {"temperature": 0.4}, "the probe's, at which it was chosen"
    assert record["selection"]["method"].startswith("best of 1 on a labelled probe")
    assert (record["selection"]["candidates"], record["selection"]["n"]) == (1, 66)
    assert record["gate"]["lower"] == -3
    card = (out / "best" / "README.md").read_text()
    assert "| [-3,2] |" in card
    assert "optimistic" in card
    best = lg.load_gated(out / "best")
    for name, value in lg.gate_parameters(best).items():
        assert value.equal(lg.gate_parameters(model)[name])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--runner", "rey"], 'Did you mean "ray"'),
        (["--seed", "1"], "Unknown option: --seed. Did you mean --seeds"),
        (["--objective", "anchored"], "Did you mean --objectives"),
        (["--processes", "2"], "Unknown option: --processes"),
        (["--objectives", "entropie"], "did you mean 'entropy'"),
        (["--objectives", "reward"], "a reward is a Python callable"),
        (["--objectives", "entropy,entropy"], "entropy is given twice"),
        (["--beta", "0.5"], "beta has no effect with objective entropy"),
        (["--ranges=0,1;0,1"], "stands there twice"),
        (["--ranges=1,0"], "wrong way round"),
        (["--seeds", "0,x"], "whole numbers"),
        (["--seeds", "3,3"], "seed 3 is given twice"),
        (["--probe", "nowhere.jsonl"], "found no file"),
        (["--anchor", "base"], "anchor"),
        (["--runner", "sequential", "--workers", "4"], "--workers has no effect with runner sequential"),
        (["--granularity", "tokens"], "--granularity"),
        (["--k", "1"], "k must be at least 2"),
        (["--resume"], "there is no sweep in"),
        (["--probe-grader", "exakt"], "did you mean 'exact'"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(place, tmp_path, more, message):
    with pytest.raises(LoragateError, match=message):
        sweep(arguments(place, tmp_path / "out", *more))
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_bad_questions_and_folders(place, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((place / "probe.jsonl").read_text().splitlines(keepends=True)[:31]))
    with pytest.raises(LoragateError, match="31 different questions"):
        sweep(arguments(place, tmp_path / "out", "--probe", str(few)))
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"prompt": f"w1 w{i}"}) + "\n" for i in range(40)))
    with pytest.raises(ConfigError, match="has no answers"):
        sweep(arguments(place, tmp_path / "out", "--probe", str(bare)))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"not empty \(it holds letter.txt\)"):
        sweep(arguments(place, tmp_path / "full"))
    with pytest.raises(ConfigError, match="needs --adapter, --data, --out"):
        sweep(["sweep"])


def test_a_failed_trial_is_told_and_the_others_go_on(place, tmp_path, capsys, monkeypatch):
    from loragate.selection import trial

    real = trial.calibrate

    def sometimes(model, tokenizer, rows, config, *rest, **more):
        if config.lower == -3:
            raise LoragateError("this one does not work")
        return real(model, tokenizer, rows, config, *rest, **more)

    monkeypatch.setattr(trial, "calibrate", sometimes)
    out = tmp_path / "out"
    argv = arguments(place, out, "--runner", "sequential", seeds="0")
    with pytest.raises(LoragateError, match=r"1 of 3 trials are not finished, so nothing was chosen.*--resume"):
        sweep(argv)
    assert "failed: one_entropy_-3_2_seed0: this one does not work" in capsys.readouterr().out
    before = stamps(out)
    assert len(before) == 2
    monkeypatch.undo()
    assert sweep([*argv, "--resume"]) == 0
    assert before.items() < stamps(out).items()


def test_a_cell_that_diverged_takes_no_part_and_the_others_are_compared(place, tmp_path, capsys, monkeypatch):
    from loragate.selection import trial

    real, tried = trial.calibrate, []

    def sometimes(model, tokenizer, rows, config, settings, **more):
        tried.append((config.lower, settings.seed))
        if (config.lower, settings.seed) == (-3, 1):
            raise DivergenceError("the loss is not finite at step 1")
        return real(model, tokenizer, rows, config, settings, **more)

    monkeypatch.setattr(trial, "calibrate", sometimes)
    out = tmp_path / "out"
    argv = arguments(place, out, "--runner", "sequential")
    assert sweep(argv) == 0
    told = capsys.readouterr().out
    assert "diverged: one_entropy_-3_2_seed1: the loss is not finite at step 1" in told
    assert "1 of 5 trials diverged and take no part, nor does a cell that lacks a seed for it" in told
    record = json.loads((out / "sweep_results.json").read_text())
    assert record["diverged"] == {"one_entropy_-3_2_seed1": "the loss is not finite at step 1"}
    assert (record["failures"], record["choices"][0]["candidates"]) == ({}, 1)
    assert (
        "Diverged, and out of the comparison:\n\n- `one_entropy_-3_2_seed1`" in (out / "sweep_results.md").read_text()
    )
    assert len(tried) == 4
    assert sweep([*argv, "--resume"]) == 0
    assert len(tried) == 4, "what diverged would diverge again"

    monkeypatch.setattr(trial, "calibrate", lambda *_, **__: (_ for _ in ()).throw(DivergenceError("not finite")))
    with pytest.raises(DivergenceError, match="no cell's training stayed finite in all its seeds; lower"):
        sweep(arguments(place, tmp_path / "all", "--runner", "sequential", seeds="0"))


def test_auto_runs_sequentially_where_ray_is_absent(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "loragate.selection.on_ray", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "loragate\[sweep\]"'):
        sweep(arguments(place, tmp_path / "out", "--runner", "ray"))
    assert sweep(arguments(place, tmp_path / "out", ranges="0,1", seeds="0")) == 0
    assert capsys.readouterr().out.count("Ray is not installed") == 1


def test_ctrl_c_leaves_a_sweep_that_goes_on(place, tmp_path, monkeypatch):
    from loragate.cli.sweep import Trials

    out = tmp_path / "out"
    argv = arguments(
        place, out, "--runner", "sequential", "--num-train-epochs", "4", "--save-steps", "0", ranges="-3,2", seeds="0"
    )
    asked = []

    def interrupt(self, one, stage, done, total, entropy):
        if stage == "training" and done == 5 and not asked:
            asked.append(True)  # a second Ctrl-C would stop without a checkpoint
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trials, "hear", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(argv)
    run = out / "trials" / "one_entropy_-3_2_seed0" / "run"
    assert [path.name for path in run.glob("checkpoint-*")] in (["checkpoint-5"], ["checkpoint-6"])
    monkeypatch.undo()
    assert sweep([*argv, "--resume"]) == 0
    other = tmp_path / "other"
    assert sweep([part if part != str(out) else str(other) for part in argv]) == 0
    assert numbers(out) == numbers(other)
