"""Push and load through a stand-in of the hub: what is sent, what is replaced, what is refused, and the cache offline."""

import json
import shutil

import pytest
import torch
import yaml
from huggingface_hub import constants

import loragate as lg
from hub_server import TOKEN, Hub, turn_to
from loragate.cli.main import main
from loragate.errors import ArtifactError, ConfigError
from loragate.gates.card import render_card
from loragate.gates.push import prepare_upload, push_gated
from loragate.models import resolve
from tiny import shake, tiny_adapter, tiny_tokenizer, write_base

SENT = ["README.md", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
SENT += [f"adapter/tokenizer/{name}" for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")]
SENT += ["gate_config.json", "gates.safetensors"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """base/, and gated/ on it as a calibration leaves it, with a run folder beside."""
    root = tmp_path_factory.mktemp("hub")
    write_base(root / "base")
    model = shake(lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 1)))
    model.peft_config["default"].base_model_name_or_path = str(root / "base")
    training = {"data": {"source": str(root / "rows.jsonl")}, "rows": 8, "response_tokens": 90}
    lg.save_gates(model, root / "gated", evidence={"training": training})
    tiny_tokenizer().save_pretrained(root / "gated" / "adapter" / "tokenizer")
    (root / "gated" / "run").mkdir()
    (root / "gated" / "run" / "metrics.jsonl").write_text("private")
    return root


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in, with huggingface_hub turned to it as HF_ENDPOINT would at its import."""
    stand_in = Hub()
    turn_to(stand_in, tmp_path / "cache", monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield stand_in
    stand_in.close()


def test_push_and_load(place, hub, token_ids, monkeypatch, capsys):
    before = {path: path.read_bytes() for path in (place / "gated").rglob("*") if path.is_file()}
    arguments = ["push", str(place / "gated"), "user/repo", "--base-id", "someone/base", "--private"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "nothing was sent" in capsys.readouterr().out
    assert hub.requests == []
    assert main([*arguments, "--message", "First"]) == 0
    out = capsys.readouterr().out
    files = hub.files("user/repo")
    assert [name for name in sorted(files) if name != ".gitattributes"] == SENT
    assert hub.messages == ["First"], "one commit"
    assert "user/repo" in hub.private
    commit = hub.refs["user/repo"]["main"]
    assert f"{hub.url}/user/repo" in out
    assert f'loragate.load_gated("user/repo", revision="{commit}")' in out
    assert TOKEN not in out
    # the folder is as it was, and nothing of this machine was sent
    assert {path: path.read_bytes() for path in (place / "gated").rglob("*") if path.is_file()} == before
    assert all(str(place).encode() not in data for data in files.values())
    record = json.loads(files["gate_config.json"])
    assert record["base"]["id"] == "someone/base"
    assert record["training"]["data"]["source"] == "rows.jsonl"
    assert json.loads(files["adapter/adapter_config.json"])["base_model_name_or_path"] == "someone/base"
    assert front_of(files["README.md"].decode())["base_model"] == "someone/base"

    with torch.no_grad():
        expected = lg.load_gated(place / "gated")(token_ids).logits
        loaded = lg.load_gated("user/repo", revision=commit, base=place / "base")
        assert torch.equal(loaded(token_ids).logits, expected)
        asked = len(hub.requests)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        for name in (f"user/repo@{commit}", "user/repo"):
            if name == "user/repo":  # the branch is known offline once it was asked for
                monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
                assert resolve(name, place / "base").record_name == f"user/repo@{commit}"
                asked = len(hub.requests)
                monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
            assert torch.equal(lg.load_gated(name, base=place / "base")(token_ids).logits, expected)
        assert len(hub.requests) == asked, "nothing was asked of the network"


def test_an_upload_is_taken_up_and_an_old_adapter_leaves(place, hub):
    first = push_gated(place / "gated", "user/repo", base_id="someone/base")
    puts = [line for line in hub.requests if line.startswith("PUT /lfs/")]
    assert len(puts) == 2, "gates and adapter, through the large file protocol"
    again = push_gated(place / "gated", "user/repo", base_id="someone/base")
    assert again.commit == first.commit, "nothing changed, so there is no new commit"
    assert len([line for line in hub.requests if line.startswith("PUT /lfs/")]) == 2
    hub.files("user/repo")["adapter/tokenizer/merges.txt"] = b"of another adapter"
    hub.files("user/repo")["notes.txt"] = b"mine"
    hub.refuse["POST /api/models/user/repo/commit"] = 500
    with pytest.raises(ArtifactError, match="files that arrived are not sent twice"):
        push_gated(place / "gated", "user/repo", base_id="someone/base", revision="next")
    del hub.refuse["POST /api/models/user/repo/commit"]
    push_gated(place / "gated", "user/repo", base_id="someone/base", revision="next", card=False)
    assert len([line for line in hub.requests if line.startswith("PUT /lfs/")]) == 2
    files = hub.files("user/repo", "next")
    assert "adapter/tokenizer/merges.txt" not in files
    assert files["notes.txt"] == b"mine"
    assert hub.refs["user/repo"]["main"] == first.commit


def test_the_name_that_is_replaced_is_replaced_in_the_adapter_too(tmp_path):
    """A relative path of two parts reads like a hub id; the id of another copy of the base stays."""
    for named, sent in (("models/base", "someone/base"), ("someone/base-4bit", "someone/base-4bit")):
        model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 1))
        model.peft_config["default"].base_model_name_or_path = named
        lg.save_gates(model, tmp_path / named / "gated", base_id="models/base")
        (tmp_path / named / "sent").mkdir()
        prepare_upload(tmp_path / named / "gated", tmp_path / named / "sent", name="repo", base_id="someone/base")
        written = json.loads((tmp_path / named / "sent" / "adapter" / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == sent


def test_a_card_that_was_edited_keeps_its_words(place, tmp_path):
    shutil.copytree(place / "gated", tmp_path / "gated")
    card = tmp_path / "gated" / "README.md"
    card.write_text(card.read_text().replace("library_name:", "license: mit\nlibrary_name:") + f"\nSee {place}/base.\n")
    base = prepare_upload(tmp_path / "gated", tmp_path / "sent", name="repo", base_id="someone/base")
    text = (tmp_path / "sent" / "README.md").read_text()
    assert base == "someone/base"
    assert front_of(text)["license"] == "mit"
    assert front_of(text)["base_model"] == "someone/base"
    assert "See someone/base." in text
    card.unlink()
    prepare_upload(tmp_path / "gated", tmp_path / "again", name="repo", base_id="someone/base")
    assert "# repo\n" in (tmp_path / "again" / "README.md").read_text()


def front_of(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_what_cannot_be_loaded_again_is_not_sent(place, tmp_path):
    folder = shutil.copytree(place / "gated", tmp_path / "gated")

    def refused(kind, words, source=folder, base_id="a/b"):
        with pytest.raises(kind, match=words):
            prepare_upload(source, tmp_path / "sent", name="r", base_id=base_id)

    refused(ConfigError, "--base-id OWNER/NAME", base_id="")
    refused(ConfigError, "is no hub id", base_id=str(place / "base"))
    refused(ArtifactError, "holds no gate_config.json", place / "base")
    adapter = tiny_adapter(seed=4)
    adapter.save_pretrained(folder / "adapter")
    refused(ArtifactError, "belong to another adapter")
    (folder / "adapter" / "adapter_config.json").write_text("{")
    refused(ArtifactError, "not a readable configuration")
    shutil.copy(place / "gated" / "adapter" / "adapter_config.json", folder / "adapter")
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    refused(ArtifactError, "not a readable safetensors")
    (folder / "gates.safetensors").write_bytes(b"x")
    refused(ArtifactError, "sha256")


def test_the_hub_refuses(place, hub, monkeypatch, capsys):
    arguments = ["push", str(place / "gated"), "user/repo", "--base-id", "a/b"]

    def refused(words):
        assert main(arguments) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert words in said
        assert "hf auth login" in said
        assert "hf_" not in said, "no token"

    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused("401")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuse["POST /api/repos/create"] = 403
    refused("403")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE")
    assert main(["push", str(place / "gated")]) == 2
    assert "expected a gated folder and a repository" in capsys.readouterr().err


def test_no_folder_of_this_machine_is_sent(place, tmp_path):
    folder = shutil.copytree(place / "gated", tmp_path / "gated")
    home = "/home/lovelace/_thesis"
    config = json.loads((folder / "gate_config.json").read_text())
    config["training"] = {
        "data": {"source": f"{home}/rows.jsonl", "names": ["C:\\Users\\lovelace\\c.txt", "modules .*/layers/.*"]},
        "stopped": "the guard fell by 3 / 4 (see https://a.example/home/x)",
    }
    (folder / "gate_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(render_card("gated", config))
    adapter = folder / "adapter" / "adapter_config.json"
    adapter.write_text(json.dumps({**json.loads(adapter.read_text()), "corda_config": {"cache_file": f"{home}/c.pt"}}))
    assert b"lovelace" in adapter.read_bytes() + (folder / "README.md").read_bytes()
    (folder / "adapter" / "tokenizer" / "README.md").write_text(f"made of {home}/c.pt")
    prepare_upload(folder, tmp_path / "sent", name="repo", base_id="someone/base")
    files = [path for path in (tmp_path / "sent").rglob("*") if path.is_file()]
    sent = {path.relative_to(tmp_path / "sent").as_posix(): path.read_bytes() for path in files}
    assert sorted(sent) == sorted([*SENT, "adapter/tokenizer/README.md"])
    for name, content in sent.items():
        assert b"lovelace" not in content, name
    shown = json.loads(sent["gate_config.json"])["training"]
    assert shown["stopped"] == config["training"]["stopped"]
    assert shown["data"] == {"source": "rows.jsonl", "names": ["c.txt", "modules .*/layers/.*"]}


PRIVATE = (
    "train.jsonl",
    "running_log.txt",
    "llamaboard_config.yaml",
    "trainer_log.jsonl",
    "all_results.json",
    "notes.md",
)


def test_only_what_a_reader_needs_is_sent_and_the_rest_is_named(place, hub, tmp_path, capsys):
    folder = shutil.copytree(place / "gated", tmp_path / "gated")
    for name in PRIVATE:
        (folder / "adapter" / name).write_text("hf_secret")
    (folder / "adapter" / "tokenizer" / "rows.txt").write_text("hf_secret")
    for name in ("LICENSE", "adapter/NOTICE.txt", "adapter/vocab.json", "adapter/merges.txt", "adapter/spiece.model"):
        (folder / name).write_text("{}")
    assert main(["push", str(folder), "user/repo", "--base-id", "someone/base"]) == 0
    files = hub.files("user/repo")
    more = ["LICENSE", "adapter/NOTICE.txt", "adapter/vocab.json", "adapter/merges.txt", "adapter/spiece.model"]
    assert {*files} == {".gitattributes", *SENT, *more}
    assert b"hf_secret" not in b"".join(files.values())
    out = " ".join(capsys.readouterr().out.split())
    left = sorted([*(f"adapter/{name}" for name in PRIVATE), "adapter/tokenizer/rows.txt", "run"])
    assert f"stays here: {', '.join(left)}" in out
    assert "user/repo (public):" in out


def test_private_files_are_not_published_in_a_repository_that_exists(place, hub, capsys):
    arguments = ["push", str(place / "gated"), "user/repo", "--base-id", "someone/base", "--private"]
    hub.create("user/repo")
    assert main(arguments) == 2
    assert "user/repo exists and is public, but was to be private" in " ".join(capsys.readouterr().err.split())
    assert [*hub.files("user/repo")] == [".gitattributes"]
    hub.private.add("user/repo")
    assert main(arguments) == 0
    assert "user/repo (private):" in capsys.readouterr().out
    hub.private.clear()
    with pytest.raises(ConfigError, match="is public"):
        push_gated(place / "gated", "user/repo", base_id="someone/base", private=True, revision="next")
    assert [*hub.refs["user/repo"]] == ["main"]


def test_another_model_is_not_written_over(place, hub):
    hub.create("user/base")
    theirs = hub.files("user/base")
    theirs |= {"README.md": b"theirs", "config.json": b"{}", "generation_config.json": b"{}"}
    before = dict(theirs)
    with pytest.raises(
        ConfigError, match=r"user/base holds something else \(config\.json, generation_config\.json, no "
    ):
        push_gated(place / "gated", "user/base", base_id="someone/base")
    assert hub.files("user/base") == before
    push_gated(place / "gated", "user/base", base_id="someone/base", revision="gated")
    assert hub.files("user/base") == before
    hub.create("user/card")
    hub.files("user/card").update({"README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"MIT"})
    push_gated(place / "gated", "user/card", base_id="someone/base")
    assert "gates.safetensors" in hub.files("user/card")


def test_a_hub_that_cannot_be_reached_is_told(place, hub, capsys):
    hub.close()
    assert main(["push", str(place / "gated"), "user/repo", "--base-id", "someone/base"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "user/repo was not written (ConnectError" in said


def test_a_gated_model_pushes_itself(place, hub, token_ids, tmp_path, caplog):
    folder = shutil.copytree(place / "gated", tmp_path / "gated")
    (folder / "adapter" / "rows.jsonl").write_text("private")
    model = lg.load_gated(folder)
    with pytest.raises(ConfigError, match="is no hub id"):
        model.push_to_hub("user/mine")
    url = model.push_to_hub("user/mine", base_id="someone/base", private=True, commit_message="Mine")
    assert url == f"{hub.url}/user/mine"
    assert "user/mine" in hub.private
    sent = sorted(name for name in hub.files("user/mine") if name != ".gitattributes")
    assert sent == SENT
    assert "user/mine: not sent: adapter/rows.jsonl" in caplog.messages
    assert "# mine\n" in hub.files("user/mine")["README.md"].decode()
    again = lg.GatedPeftModel.from_pretrained("user/mine", base=place / "base")
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)
