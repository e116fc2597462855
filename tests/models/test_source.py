"""What is said of a name that leads nowhere."""

import json
import os

import pytest

from loragate.errors import ArtifactError, ConfigError
from loragate.models import require_here, resolve
from loragate.models.source import _suggest_contents
from tiny import tiny_adapter


def adapter(folder, when=0):
    folder.mkdir(parents=True)
    file = folder / "adapter_config.json"
    file.write_text("{}")
    os.utime(file, (when, when))
    return folder


def test_an_adapter_below_the_folder_is_named_the_newest_first(tmp_path):
    assert _suggest_contents(tmp_path) == ""
    early = adapter(tmp_path / "checkpoint-9", 1000)
    assert _suggest_contents(tmp_path) == f"; give the adapter in it, {early}"
    late = adapter(tmp_path / "checkpoint-10", 2000)
    assert _suggest_contents(tmp_path) == f"; give the adapter in it, {late} (the newest of 2 there)"
    with pytest.raises(ConfigError, match=f"holds no adapter_config.json.*{late}"):
        resolve(tmp_path, expect="adapter")


def test_a_file_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    adapter(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"adapter mine/adapter_config.json is a file, expected the folder .*\(mine\)"
    ):
        require_here("adapter", "mine/adapter_config.json")


def test_a_base_that_moved_is_traced_to_the_adapter(tmp_path):
    mine = adapter(tmp_path / "mine")

    tiny_adapter(target_modules=["q_proj"]).save_pretrained(mine)
    record = json.loads((mine / "adapter_config.json").read_text())

    def named(base):
        record["base_model_name_or_path"] = base and str(base)
        (mine / "adapter_config.json").write_text(json.dumps(record))
        return mine

    with pytest.raises(ConfigError, match=r"names as its base model .*gone, .* say where it is with --base"):
        resolve(named(tmp_path / "gone"))
    assert resolve(mine, "other/base").base.name == "other/base"
    assert resolve(mine, base_optional=True).kind == "adapter"
    assert resolve(named("owner/name")).base.name == "owner/name"
    assert resolve(named("gpt2")).base.name == resolve(mine, "gpt2").base.name == "gpt2"
    with pytest.raises(ConfigError, match="does not name its base model"):
        resolve(named(None))


def test_another_kind_than_expected_is_refused(tmp_path):
    mine = adapter(tmp_path / "mine")
    with pytest.raises(ConfigError, match="is an adapter, not a base model"):
        resolve(mine, expect="base")
    (mine / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ArtifactError, match="peft_type is IA3"):
        resolve(mine, "owner/base")
    (tmp_path / "unfinished" / "run").mkdir(parents=True)
    (tmp_path / "unfinished" / "run" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="unfinished run"):
        resolve(tmp_path / "unfinished")
    with pytest.raises(ConfigError, match=r"override of λ .* has no effect"):
        resolve(f"{tmp_path}@unit")


def test_a_folder_of_checkpoints_is_no_base_and_the_newest_in_it_is_named(tmp_path):
    for step in (2, 4):
        adapter(tmp_path / "run" / f"checkpoint-{step}", step)
    with pytest.raises(ConfigError, match=r"give the adapter in it, .*checkpoint-4 \(the newest of 2 there\)"):
        resolve(tmp_path / "run", allow_override=True)
