"""Stage I from names to a folder: the call and the command give the same adapter, and both refuse the same things."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer

import loragate as lg
from loragate.cli.main import main
from loragate.errors import ConfigError, DataError, TrainingError
from loragate.models.settings import Loading
from loragate.selection.sweep import Sweep
from loragate.training import FineTuningSettings, GateTrainingSettings, RowsSettings
from loragate.training.fine_tuning import AdapterRun
from loragate.training.rows import read_rows
from tiny import TEMPLATE, tiny_base, tiny_rows, write_base

SETTINGS = FineTuningSettings(
    batch_size=4, per_device_train_batch_size=2, rank=2, max_steps=3, max_length=64, logging_steps=1
)
FLAGS = "--batch-size 4 --per-device-train-batch-size 2 --rank 2 --max-steps 3 --max-length 64 --logging-steps 1 --device cpu"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_base("base")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(12)))
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_call_and_the_command_write_the_same_folder(place):
    asked = RowsSettings(data="rows.jsonl", select="shuffled")
    result = lg.make_adapter("base", asked, "called", SETTINGS, max_rows=10)
    rows = ["--data", "rows.jsonl", "--select", "shuffled", "--max-rows", "10"]
    assert main(["sft", "--model", "base", *rows, "--out", "typed", *FLAGS.split()]) == 0
    assert (result.steps, result.rows) == (3, 10)
    assert contents(place / "called") == contents(place / "typed")
    assert (place / "called" / "run" / "run.json").read_bytes() == (place / "typed" / "run" / "run.json").read_bytes()
    assert "auto_map" in json.loads((place / "base" / "tokenizer_config.json").read_text())
    assert len(AutoTokenizer.from_pretrained("called")) == len(AutoTokenizer.from_pretrained("base"))
    assert PeftModel.from_pretrained(tiny_base(), "called").peft_config["default"].base_model_name_or_path


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_base_stays_as_it_is_stored_where_products_are_in_16_bits(place, precision, dtype):
    write_base("stored", tiny_base().bfloat16())
    settings = replace(SETTINGS, precision=precision)
    asked = RowsSettings(data="rows.jsonl")
    run = AdapterRun("stored", asked, place / "adapter", settings, 0, Loading(device="cpu"), "none", False, False)
    run.read()
    run.load()
    assert {weight.dtype for weight in run.base.parameters()} == {dtype}  # float32 is twice the memory
    run.train()
    written = load_file("adapter/adapter_model.safetensors").values()
    assert {weight.dtype for weight in written} == {torch.float32}
    # and where gates are trained on it
    gates = GateTrainingSettings(precision=precision)
    sweep = Sweep("adapter", lambda: read_rows(asked, 0, 0), gates, loading=Loading(device="cpu"))
    model = sweep.open([], place / "gates").context.model
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" not in name} == {dtype}


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_run_that_was_stopped_goes_on(place, number, name):
    """Batch systems send SIGTERM before they kill."""
    before = signal.getsignal(number)

    def interrupt(report):
        if report.step == 1 and not report.values:
            os.kill(os.getpid(), number)

    lg.make_adapter("base", "rows.jsonl", "whole", SETTINGS)
    with pytest.raises(TrainingError, match=rf"stopped by {name} at step \d .*resume=True"):
        lg.make_adapter("base", "rows.jsonl", "adapter", SETTINGS, on_step=interrupt)
    assert signal.getsignal(number) is before
    with pytest.raises(ConfigError, match="holds an unfinished run"):
        lg.make_adapter("base", "rows.jsonl", "adapter", SETTINGS)
    lg.make_adapter("base", "rows.jsonl", "adapter", SETTINGS, resume=True)
    whole, resumed = (load_file(place / name / "adapter_model.safetensors") for name in ("whole", "adapter"))
    assert all(bool((whole[name] == resumed[name]).all()) for name in whole)


def test_a_second_training_begins_anew_where_that_is_asked_for(place):
    first = ["sft", "--model", "base", "--data", "rows.jsonl", "--out", "adapter", *FLAGS.split()]
    assert main(first) == 0
    assert main([*first, "--seed", "7"]) == 2, "nothing is overwritten unasked"
    assert main([*first, "--seed", "7", "--overwrite", "--resume"]) == 2
    assert main([*first, "--seed", "7", "--overwrite"]) == 0
    lg.make_adapter("base", "rows.jsonl", "new", replace(SETTINGS, seed=7))
    assert contents(place / "adapter") == contents(place / "new")
    (place / "mine").mkdir()
    (place / "mine" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        lg.make_adapter("base", "rows.jsonl", "mine", SETTINGS, overwrite=True)


def test_an_adapter_that_is_trained_on_is_not_written_over(place, fails):
    first = ["sft", "--model", "base", "--data", "rows.jsonl", *FLAGS.split(), "--out", "adapter"]
    assert main([*first, "--save-steps", "1"]) == 0
    (place / "alias").symlink_to("adapter")
    before = {path: path.read_bytes() for path in place.rglob("adapter/**/*") if path.is_file()}
    assert before
    checkpoint = next((place / "adapter" / "run").glob("checkpoint-*"))
    for start, told in (("adapter", "is"), ("alias", "is"), (str(checkpoint), "holds")):
        said = fails(*first, "--adapter", start, "--overwrite")
        assert f"--out adapter {told} the adapter that is trained on (--adapter {start})" in said
        with pytest.raises(ConfigError, match="Choose another --out"):
            lg.make_adapter("base", "rows.jsonl", "adapter", replace(SETTINGS, adapter=start), overwrite=True)
    assert {path: path.read_bytes() for path in place.rglob("adapter/**/*") if path.is_file()} == before
    assert main([*first[:-1], "longer", "--adapter", "adapter"]) == 0


def test_an_adapter_is_trained_on_with_its_own_template(place):
    (place / "own.jinja").write_text(TEMPLATE.replace("<user> {{", "<user> w1 w1 {{"))
    common = ["sft", "--model", "base", "--data", "rows.jsonl", *FLAGS.split()]
    assert main([*common, "--chat-template", "own.jinja", "--out", "first"]) == 0
    assert main([*common, "--adapter", "first", "--out", "second"]) == 0
    assert main([*common, "--adapter", "first", "--chat-template", "own.jinja", "--out", "third"]) == 0
    tokens = [json.loads((place / name / "run" / "run.json").read_text())["tokens"] for name in ("second", "third")]
    assert tokens[0] == tokens[1]
    assert (place / "second" / "chat_template.jinja").read_text() == (place / "own.jinja").read_text()


def test_what_cannot_work_is_refused_before_the_base_is_loaded(place, monkeypatch):
    monkeypatch.setattr("loragate.training.fine_tuning.open_base", None)
    (place / "taken").mkdir()
    (place / "taken" / "mine.txt").touch()
    for model, data, folder, more, error, told in (
        ("base", "rows.jsonl", "taken", {}, ConfigError, "is not empty"),
        ("base", "none.jsonl", "new", {}, DataError, "none.jsonl"),
        ("nothing", "rows.jsonl", "new", {}, ConfigError, "does not exist"),
        ("base", "rows.jsonl", "new", {"settings": FineTuningSettings(objective="mask")}, ConfigError, "keep_mask"),
    ):
        with pytest.raises(error, match=told):
            lg.make_adapter(model, data, folder, **{"settings": SETTINGS, **more})
    assert not (place / "new").exists()
