"""What is said of a name that leads nowhere."""

import os
from types import SimpleNamespace

import pytest

from loragate.cli.models import adapter_record, base_named, require_place
from loragate.cli.places import beside, inside
from loragate.errors import ConfigError
from loragate.gates import GateConfig, attach_gates, detach_gates
from tiny import tiny_adapter


def adapter(folder, when=0):
    folder.mkdir(parents=True)
    file = folder / "adapter_config.json"
    file.write_text("{}")
    os.utime(file, (when, when))
    return folder


def test_the_folder_that_was_meant_is_named(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adaptar.txt").write_text("a file is no candidate")
    assert beside(str(tmp_path / "adaptr")) == f"; did you mean '{tmp_path / 'adapter'}'?"
    assert beside(str(tmp_path / "quite-another")) == ""
    assert beside(str(tmp_path / "gone" / "adapter")) == f"; its folder {tmp_path / 'gone'} does not exist either"


def test_an_adapter_below_the_folder_is_named_the_newest_first(tmp_path):
    assert inside(tmp_path) == ""
    early = adapter(tmp_path / "checkpoint-9", 1000)
    assert inside(tmp_path) == f"; give the adapter in it, {early}"
    late = adapter(tmp_path / "checkpoint-10", 2000)
    assert inside(tmp_path) == f"; give the adapter in it, {late} (the newest of 2 there)"
    with pytest.raises(ConfigError, match=f"holds no adapter_config.json.*{late}"):
        adapter_record(str(tmp_path))


def test_a_whole_model_is_called_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "holds a whole model: loragate extract" in inside(tmp_path)


def test_a_file_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    adapter(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"adapter mine/adapter_config.json is a file, expected the folder .*\(mine\)"
    ):
        require_place("adapter", "mine/adapter_config.json")


def test_a_base_that_moved_is_traced_to_the_adapter(tmp_path):
    record = SimpleNamespace(base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(
        ConfigError, match=r"adapter mine names as its base model .*gone, .* say where it is with --base"
    ):
        base_named("", record, "mine")
    assert base_named("other/base", record, "mine") == "other/base"
    record.base_model_name_or_path = "owner/name"
    assert base_named("", record, "mine") == "owner/name"
    record.base_model_name_or_path = None
    with pytest.raises(ConfigError, match="mine does not name its base model"):
        base_named("", record, "mine")


def test_gates_that_peft_lost_are_missed(tmp_path, caplog):
    model = attach_gates(tiny_adapter(), GateConfig(-1, 2))
    model.save_pretrained(tmp_path / "saved")
    caplog.clear()
    adapter_record(str(tmp_path / "saved"))
    assert "gates that were lost when PEFT saved it" in caplog.text
    detach_gates(model).save_pretrained(tmp_path / "plain")
    caplog.clear()
    adapter_record(str(tmp_path / "plain"))
    assert not caplog.text
