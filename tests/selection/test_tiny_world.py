"""The command on the tiny world: its own task, grader and chat template, from a fresh adapter to a gated folder or the adapter."""

from __future__ import annotations

import dataclasses
import json

import pytest
from places import numbers, sweep

from loragate.cli.main import main
from loragate.world.base import shipped_base_folder
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import problems


@pytest.mark.slow("whole commands")
def test_a_sweep_of_the_tiny_world(tmp_path, capsys):
    base, train = shipped_base_folder(), tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(320, 0)))
    rows = [dataclasses.asdict(problem) for problem in problems("test", 40, (4, 4), 5)]
    (tmp_path / "probe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = ["sft", "--model", str(base), "--data", str(train), "--batch-size", "32", "--micro-batch-size", "32"]
    assert main([*sft, "--learning-rate", "2e-3", "--out", str(tmp_path / "adapter")]) == 0
    argv = ["sweep", "--adapter", str(tmp_path / "adapter"), "--data", str(train), "--out", str(tmp_path / "out")]
    argv += ["--probe", str(tmp_path / "probe.jsonl"), "--probe-task", "tiny"]
    argv += ["--probe-max-new-tokens", "72", "--runner", "sequential", "--ranges=-3,1;0,1;-6,3", "--k", "20"]
    argv += ["--batch-size", "32", "--micro-batch-size", "32", "--learning-rate", "2e-2"]
    capsys.readouterr()
    assert sweep(argv) == 0
    text = capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "sweep_results.json").read_text())
    choice = summary["choices"][0]
    means = {cell["name"]: cell["probe"]["mean"] for cell in summary["cells"]}
    assert len(numbers(tmp_path / "out")) == 4
    assert 0 < choice["adapter_probe"]["mean"] < 1
    best = max(means, key=lambda name: means[name])
    assert choice["accepted"] == (means[best] > choice["adapter_probe"]["mean"])
    assert choice["picked"] == (best if choice["accepted"] else "adapter")
    assert (tmp_path / "out" / "best" / "gate_config.json").exists() == choice["accepted"]
    assert ("chosen: " in text) == choice["accepted"]
