"""`loragate doctor`: what is printed and written, its exit statuses, and what Ctrl-C leaves."""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loragate.cli.main import main
from loragate.doctor import examination
from loragate.doctor.record import FILE, Strength, read_examination
from loragate.gates.adapter_rules import Finding
from tiny import tiny_rows, tiny_tokenizer, write_adapter, write_base, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("doctor")
    write_base(root / "base", tokenizer=tiny_tokenizer())
    write_adapter(root / "adapter", root / "base")
    write_rows(root / "rows.jsonl", tiny_rows(8))
    return root


@pytest.fixture(autouse=True)
def pages(monkeypatch, tmp_path):
    """The pages that were written, as [(record, path)]; the working folder is an empty one."""
    written = []

    def write_page(record, path):
        written.append((record, path))
        path.write_text("<html>")

    room = types.ModuleType("loragate.report.examination")
    room.write_page = write_page
    monkeypatch.setitem(sys.modules, "loragate.report.examination", room)
    monkeypatch.chdir(tmp_path)
    return written


@pytest.fixture
def broken(place, tmp_path):
    folder = shutil.copytree(place / "adapter", tmp_path / "broken")
    file = folder / "adapter_model.safetensors"
    save_file({key: torch.full_like(value, float("nan")) for key, value in load_file(file).items()}, file)
    return folder


def said(capsys):
    return capsys.readouterr().out.splitlines()


def parts(*names):
    """Parts of an examination: one with a finding, one with measures."""
    curve = Strength("kept", "forgetting", "kept", (), None, None, ("Strength 0.5 gives back most.",))
    found = {"answers": (None, [Finding("never-stops", "warning", "answers never stop", "train on the end")])}
    found["strength"] = (curve, [])
    return {name: lambda exam, name=name: found[name] for name in names}


def test_quick_leaves_nothing_and_says_what_comes_next(place, tmp_path, capsys, pages):
    assert main(["doctor", str(place / "adapter"), "--quick"]) == 0
    lines = said(capsys)
    assert lines[0] == f"adapter {place / 'adapter'} (r 4, α 8) on {place / 'base'}"
    assert lines[-2] == "verdict: healthy, as far as its files show"
    assert lines[-1].startswith(f"next: loragate doctor {place / 'adapter'} --data FILE")
    assert not any(tmp_path.iterdir())
    assert pages == []
    assert "TORCHDYNAMO_DISABLE" not in os.environ, "what others compile is theirs"


def test_errors_end_with_one_and_come_with_their_remedies(broken, tmp_path, capsys):
    assert main(["doctor", str(broken), "--quick"]) == 1
    lines = said(capsys)
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert "not finite" in error
    assert "earlier checkpoint" in error
    assert error.endswith("[weights-not-finite]")
    assert lines[-2] == "verdict: broken: 1 error (weights-not-finite)"
    assert main(["doctor", str(broken)]) == 1
    lines = said(capsys)
    assert "not examined: answers, effect, learned, strength, as the adapter cannot be loaded as it is" in lines
    assert read_examination(tmp_path / "doctor-broken" / FILE).verdict == "broken"


def test_json_alone_on_standard_output(broken, capsys, pages):
    assert main(["doctor", str(broken), "--quick", "--json", "--out", "kept"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "broken"
    assert found == json.loads(Path("kept/doctor.json").read_text())
    assert [str(path) for _, path in pages] == ["kept/doctor.html"]
    assert pages[0][0] == found


def test_a_whole_examination_has_a_page_and_a_record(place, tmp_path, capsys, monkeypatch, pages):
    monkeypatch.setattr(examination, "PARTS", parts("answers", "strength"))
    line = ["doctor", str(place / "adapter"), "--data", str(place / "rows.jsonl")]
    assert main(line) == 0
    lines = said(capsys)
    assert "warning: answers never stop. Train on the end [never-stops]" in lines
    assert "strength: Strength 0.5 gives back most." in lines
    assert lines[-3] == "verdict: usable, with 1 warning (never-stops)"
    assert lines[-2].startswith("written: doctor-adapter/doctor.html (page), doctor-adapter/doctor.json (record)")
    assert lines[-1].startswith(f"next: loragate calibrate --adapter {place / 'adapter'} --data {place / 'rows.jsonl'}")
    assert pages[0][0]["findings"][0]["code"] == "never-stops"
    assert main(line) == 2, "what is there is not written over"
    assert "--resume" in capsys.readouterr().err
    assert main([*line, "--resume"]) == 0


@pytest.mark.parametrize("json_alone", [False, True])
def test_what_was_left_out_is_said(place, tmp_path, capsys, monkeypatch, pages, json_alone):
    write_adapter(tmp_path / "embedded", place / "base", target_modules=["q_proj", "embed_tokens"])
    dev = write_rows(tmp_path / "dev.jsonl", [{"prompt": f"w{at} w1", "answer": "w3"} for at in range(40)])

    def asks(exam):
        assert exam.score_questions("dev", (0.5,)) == exam.score_questions("dev", (0.5,)) == {}
        return None, []

    monkeypatch.setattr(examination, "PARTS", {"strength": asks, **parts("answers")})
    line = ["doctor", str(tmp_path / "embedded"), "--dev-data", str(dev), *["--json"] * json_alone]
    assert main(line) == 0
    out, err = capsys.readouterr()
    sentence = "the dev set is not asked: one λ for the whole adapter does not reach model.embed_tokens"
    assert (err if json_alone else out).count(f"left out: {sentence}") == 1
    assert pages[0][0]["left_out"] == [sentence]
    if json_alone:
        assert json.loads(out)["left_out"] == [sentence]
    kept = tmp_path / "doctor-embedded" / FILE
    assert read_examination(kept).left_out == (sentence,)
    older = {key: value for key, value in json.loads(kept.read_text()).items() if key != "left_out"}
    kept.write_text(json.dumps(older))
    assert read_examination(kept).left_out == ()


def test_what_was_interrupted_leaves_its_page(place, tmp_path, capsys, monkeypatch, pages):
    def stopped(exam):
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "PARTS", {**parts("answers"), "effect": stopped})
    assert main(["doctor", str(place / "adapter"), "--out", "kept"]) == 130
    lines = said(capsys)
    assert "not examined: effect; the same command with --resume goes on" in lines
    assert lines[-1] == "next: the same command with --resume"
    assert pages[0][0]["unfinished"] == ["effect"]
    monkeypatch.setattr(examination, "PARTS", parts("answers", "strength"))
    assert main(["doctor", str(place / "adapter"), "--out", "kept", "--resume"]) == 0


def test_nothing_found_so_far_is_not_healthy(place, capsys, monkeypatch, pages):
    def stopped(exam):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        examination, "PARTS", {"answers": lambda exam: (None, []), "effect": stopped, "learned": stopped}
    )
    assert main(["doctor", str(place / "adapter")]) == 130
    assert "verdict: nothing found so far; 2 of 5 parts not done" in said(capsys)
    assert pages[0][0]["verdict"] == "unfinished"


def test_an_interrupt_before_anything_is_known(place, tmp_path, monkeypatch, pages):
    def stopped(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(examination.static, "examine_static", stopped)
    assert main(["doctor", str(place / "adapter")]) == 130
    assert pages == []


def test_a_base_that_is_not_here(place, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(place / "adapter", tmp_path / "moved")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "/no/such/base"}))
    assert main(["doctor", str(folder), "--quick"]) == 0
    lines = said(capsys)
    assert lines[-2] == "verdict: not known without its base, with 1 warning (base-unreachable)"
    assert lines[-1] == f"next: loragate doctor {folder} --base FOLDER --quick"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "nobody/nothing"}))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["doctor", str(folder), "--quick"]) == 0
    words = " ".join(said(capsys))
    assert "no such folder, and the hub's cache does not hold it (HF_HUB_OFFLINE is set" in words
    assert words.count("with --base") == 1, "said once, as what to do"
    assert main(["doctor", str(folder), "--base", str(place / "base"), "--quick"]) == 0
    assert "base-unreachable" not in capsys.readouterr().out


def test_wrong_calls(place, tmp_path, fails):
    adapter = str(place / "adapter")
    assert "needs ADAPTER" in fails("doctor")
    assert "holds no adapter_config.json" in fails("doctor", str(tmp_path), "--quick")
    assert "--data has no effect with --quick" in fails("doctor", adapter, "--quick", "--data", "x")
    assert "--dev-grader has no effect without --dev-data" in fails("doctor", adapter, "--dev-grader", "exact")
    assert "--base" in fails("doctor", adapter, "--quick", "--base", str(tmp_path / "none"))
    assert "found no file" in fails("doctor", adapter, "--data", str(tmp_path / "none.jsonl"))
    assert "--max-rows must be at least 1" in fails("doctor", adapter, "--max-rows", "0")


def test_a_scale_that_is_not_alpha_over_r_is_shown(place, tmp_path, capsys):
    folder = shutil.copytree(place / "adapter", tmp_path / "rs")
    main(["doctor", str(folder), "--quick"])
    assert ", scale" not in said(capsys)[0]
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | {"use_rslora": True}
    file.write_text(json.dumps(config))
    main(["doctor", str(folder), "--quick"])
    rank, alpha = config["r"], config["lora_alpha"]
    assert f"(r {rank}, α {alpha:g}, scale {alpha / rank**0.5:.3g})" in said(capsys)[0]
