"""`loragate recipes` as typed: list, show, run with local stand-ins, killed and resumed, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import loragate as lg
from loragate.cli.arguments import parse
from loragate.cli.main import main
from loragate.cli.sft import COMMAND as SFT
from loragate.recipes.rehearsal import numina_rows
from loragate.world.base import shipped_base_folder

SCALE = "math/qwen2.5-math-1.5b/scale"
SMALL = [
    "max_rows=24",
    "max_steps=4",
    "batch_size=8",
    "per_device_train_batch_size=8",
    "max_length=96",
    "precision=fp32",
]
SMALL += ["save_steps=1", "device=cpu"]


def local(place):
    words = ["--local-model", str(place / "base"), "--local-data", str(place / "math.parquet")]
    for text in SMALL:
        words += ["--set", text]
    return words


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand-ins")
    shutil.copytree(shipped_base_folder(), folder / "base")
    pq.write_table(pa.Table.from_pylist(numina_rows(24)), folder / "math.parquet")
    return folder


def test_list_and_show(capsys):
    assert main(["recipes", "list", "math/qwen3-4b-base/scale"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["math/qwen3-4b-base/scale-auto", "beyond", "the", "paper"]
    assert any(line.split() == ["math/qwen3-4b-base/scale", "Table", "1;", "Fig.", "1"] for line in lines)
    assert main(["recipes", "show", SCALE, "--set", "sft.rank=8", "--out", "runs/x"]) == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert shown["sft"]["rank"] == 8
    assert shown["calibrate"]["range"] == "-6,3"
    assert "# yours: --set" in text
    assert "# paper Sec. 6.1: r = 16" not in text
    assert f"loragate recipes run {SCALE} --out runs/x --set sft.rank=8" in text
    assert f"loragate recipes run {SCALE} --out runs/x --set sft.rank=8 --dry-run" in text


@pytest.mark.parametrize(
    ("wanted", "there", "absent"),
    [
        ("table 6", f"{SCALE.rpartition('/')[0]}/gate-ce ", "/dora "),
        ("Table 10", "code/qwen2.5-math-7b/interventions ", "math/qwen2.5-math-7b/interventions "),
        ("fig. 4", "/lora ", "/gate-ce "),
        ("Figure 3", "code/qwen3-4b-base/grid ", "/scale "),
        ("tables 7", "/dft ", "/grid "),
        ("fig. 1", "code/qwen3-4b-base/scale ", "/lora "),
        ("FIGURE 1", "math/qwen2.5-math-1.5b/scale ", "/gate-ce "),
        ("app. c", "/eksft ", "/lora "),
        ("tables  #5", "/delta-entropy ", "/eksft "),
    ],
)
def test_list_by_a_place_in_the_paper(wanted, there, absent, capsys):
    assert main(["recipes", "list", wanted]) == 0
    text = capsys.readouterr().out
    assert there in text
    assert absent not in text


def saved(folder, text):
    (folder / "sft.yaml").write_text(f"# loragate {text}")
    return folder / "sft.yaml"


def test_dry_run_writes_nothing(place, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["recipes", "run", SCALE, "--dry-run", "--out", str(out), *local(place)]) == 0
    first, second = capsys.readouterr().out.split("# loragate ")[1:3]
    config = yaml.safe_load(first.partition("\n")[2])
    assert (config["model"], config["data"]) == (str(place / "base"), str(place / "math.parquet"))
    assert "revision" not in config
    assert second.startswith(f"calibrate --config {out}/config/2-calibrate.yaml\nadapter: {out}/sft\n")
    options, _ = parse(SFT, ["--config", str(saved(tmp_path, first))])
    assert (options.rank, options.max_rows) == (16, 24), "what is printed is what --config reads"
    assert not out.exists()
    assert main(["recipes", "run", SCALE, "--dry-run", "--stages", "calibrate", *local(place)]) == 0
    text = capsys.readouterr().out
    assert "loragate calibrate" in text
    assert "loragate sft" not in text


def test_what_is_refused(place, tmp_path, fails):
    assert "did you mean 'show'" in fails("recipes", "shaw", SCALE)
    assert "needs a name" in fails("recipes", "run")
    assert "takes one name" in fails("recipes", "show", SCALE, SCALE)
    assert "no recipe's name contains 'gpt'" in fails("recipes", "list", "gpt")
    assert "no recipe's name contains 'table 99'" in fails("recipes", "list", "table 99")
    assert "--dry-run has no effect on loragate recipes show" in fails("recipes", "show", SCALE, "--dry-run")
    assert "expected key=value" in fails("recipes", "show", SCALE, "--set", "rank")
    message = fails("recipes", "show", SCALE, "--set", "sft.objective=dtf")
    assert f"{SCALE}: stage 'sft': objective must be one of" in message
    assert "did you mean 'dft'" in message
    message = fails("recipes", "show", SCALE, "--set", "sft.rank=many")
    assert "stage 'sft': rank must be a whole number, found 'many'" in message
    assert "--local-model" in fails("recipes", "run", SCALE, "--local-model", tmp_path / "nowhere")
    own = tmp_path / "own.yaml"
    own.write_text("stages: [sft]\nsft: {model: a/b, data: rows.jsonl, rnak: 4}\n")
    assert "stage 'sft': unknown key 'rnak'; did you mean 'rank'" in fails("recipes", "check", own)
    assert "has no stage 'sfr'; did you mean 'sft'" in fails("recipes", "run", SCALE, "--stages", "sfr", *local(place))


@pytest.mark.slow("kills")
def test_run_killed_resumed_and_used(place, tmp_path):
    """Stage I and II of a recipe through the hub-format loader, killed once with SIGKILL; the gates are then loaded."""
    out = tmp_path / "run"
    words = [sys.executable, "-m", "loragate", "recipes", "run", SCALE, "--stages", "sft,calibrate", "--out", str(out)]
    words += [*local(place), "--set", "sft.max_steps=60"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(words, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 900
    while not list(out.glob("sft/run/checkpoint-*")) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (out / "resolved.yaml").is_file()
    assert "finished" not in json.loads((out / "recipe.json").read_text())["state"].get("sft", {})
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sft: going on" in done.stdout
    state = json.loads((out / "recipe.json").read_text())["state"]
    assert len(state["sft"]["started"]) == 2
    assert state["calibrate"]["finished"]
    assert json.loads((out / "sft" / "run" / "run.json").read_text())["data"]["rows"] == 24
    assert json.loads((out / "calibrate" / "gate_config.json").read_text())["gate"]["lower"] == -6
    model = lg.load_gated(out / "calibrate")
    assert len(lg.gate_parameters(model)) == 42
    again = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.count("finished before") == 2
    Path(place / "math.parquet").rename(place / "moved.parquet")
    try:
        gone = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert gone.returncode == 2
        assert "--local-data" in gone.stderr
    finally:
        (place / "moved.parquet").rename(place / "math.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launcher: touch there", "'launcher' is 'touch there'"),
        ("sft: {launcher: touch there}", "unknown key 'launcher'"),
        ("stages: [sft, push]", "'push' is no stage"),
        ("sft: {trust_remote_code: true}", "--set sft.trust_remote_code=true"),
        ("eval: {trust-remote-code: true}", "--set eval.trust_remote_code=true"),
        ("eval: {sandbox: rlimits}", "--set eval.sandbox=rlimits"),
    ],
)
def test_a_file_of_others_starts_no_program_and_opens_nothing(text, message, place, tmp_path, fails):
    own = yaml.safe_load(text)
    shared = {"model": str(place / "base"), "data": str(place / "math.parquet"), "trust_remote_code": False}
    own["sft"] = {**shared, **own.get("sft", {})}
    own["eval"] = {"model": "{sft}", "suite": "math", **own.get("eval", {})}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"stages": ["sft", "eval"], **own}))
    for verb in ("run", "rehearse", "show"):
        assert message in fails("recipes", verb, tmp_path / "own.yaml", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_the_command_line_says_counts(capsys):
    assert main(["recipes", "show", SCALE, "--set", "sft.trust_remote_code=true"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["sft"]["trust_remote_code"] is True
