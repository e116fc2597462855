"""Version 1 of a sweep's files is frozen: a sweep written once is read, resumed and summarised with the same values."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from loragate.errors import ConfigError
from loragate.files import file_sha256
from loragate.selection.candidate import Candidate
from loragate.selection.outcome import best_record, summarise
from loragate.selection.store import Store, Study

GOLDEN = Path(__file__).parents[1] / "golden" / "sweep-v1"
FROZEN = {
    "sweep.json": "9df6f8160ce66c0ee78ffe99d26250274ac4b39c52500cd226e6630ec94524a5",
    "sweep_results.json": "4b06798788abe7be9a2ca4e902ceaa44e3e1311a722737bcae8d65b89c6ab66d",
    "trials/golden_entropy_-3_1_seed0/result.json": "335016b80364e447fe4cb4a1c05cd6463c53e6f325f4630ebd93dc32dd344791",
    "trials/golden_entropy_-3_1_seed1/result.json": "f1a52e97c939f28c752d3cd37154f53f8e99e6d2744d42d3ca3389e652e68bdd",
    "trials/golden_entropy_0_1_seed0/result.json": "50fd3f8adfa7a2bc679c88bdd5a9679794537ced606f150e078992dad3d6756d",
    "trials/golden_entropy_0_1_seed1/result.json": "e6829098f710dde15a44bc31c10be82b932957a7c379584b2e9caf8ce753147c",
    "trials/golden_untouched/result.json": "eeb24a2d4827afe1027ab79084721215dafe5c321387471683c67a46309e9d9f",
}
NOT_IDENTITY = ("format", "version", "fingerprint", "trials")


@pytest.fixture
def plan():
    stored = json.loads((GOLDEN / "sweep.json").read_text())
    trials = tuple(map(Candidate.from_record, stored["trials"].values()))
    return Study(trials, {name: value for name, value in stored.items() if name not in NOT_IDENTITY})


def test_the_golden_files_were_not_written_again():
    assert {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()} == set(FROZEN)
    for name, digest in FROZEN.items():
        assert file_sha256(GOLDEN / name) == digest, name


def test_a_sweep_of_version_one_is_resumed(plan, tmp_path):
    stored = json.loads((GOLDEN / "sweep.json").read_text())
    assert plan.as_dict() == stored, "names, slugs and the fingerprint are what they were"
    shutil.copytree(GOLDEN, tmp_path / "sweep")
    plan.begin(tmp_path / "sweep", resume=True)
    other = dataclasses.replace(plan, identity={**plan.identity, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="begun with dtype = 'auto', now it is 'bfloat16'"):
        other.begin(tmp_path / "sweep", resume=True)
    assert Store(GOLDEN, other).finished() == {}, "results of another sweep do not count"


def test_its_trials_are_finished_and_say_what_they_said(plan):
    results = Store(GOLDEN, plan).finished()
    assert list(results) == [one.slug for one in plan.candidates]
    chosen = results["golden_entropy_0_1_seed0"]
    assert chosen.probe.scores.shape == (32, 2)
    assert chosen.probe.signs == {"finished": 1.0, "tokens": 4.5, "distinct": 0.75}
    assert (chosen.training["entropy_before"], chosen.training["entropy_after"]) == (0.5, 0.25)
    assert chosen.modules["model.layers.0.self_attn.q_proj"] == {"mean": 0.5, "below_zero": 0.125}
    assert results["golden_untouched"].training == {}


def test_the_choice_is_what_it_was(plan):
    summary = summarise(plan, Store(GOLDEN, plan).finished())
    before = json.loads((GOLDEN / "sweep_results.json").read_text())
    assert set(before) <= set(summary), "keys are added, not renamed"
    for key in ("format", "version", "sweep", "seeds", "questions", "samples", "comparisons", "missing"):
        assert summary[key] == before[key], key
    assert summary["seconds"].items() <= before["seconds"].items()
    for now, then in zip(summary["cells"], before["cells"], strict=True):
        for key in ("name", "seeds", "answers", "complete", "by_seed", "differs", "entropy_before", "entropy_after"):
            assert now[key] == then[key], key
        for key in ("probe", "difference"):
            assert now[key] == pytest.approx(then[key], abs=1e-9), key
    choice = summary["choices"][0]
    assert (choice["picked"], choice["accepted"], choice["seed"]) == ("[0,1]", True, 0)
    assert best_record(plan, summary, choice, {})["range"] == [0.0, 1.0]
