"""`owner/name@revision` of adapters and bases, wherever a command takes one, against the stand-in of the hub."""

import json
import shutil

import pytest

from hub_server import Hub, turn_to
from loragate.cli.evaluation_runs import load_inputs
from loragate.cli.generate import GenerateOptions
from loragate.cli.main import main
from loragate.errors import ArtifactError
from loragate.hub_names import hub_source, is_hub_id, parse_hub_name, split_revision
from loragate.models import ModelRef, open_tokenizer, resolve
from tiny import tiny_adapter, tiny_rows, write_adapter, write_base, write_rows

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
BASE_OLD, BASE_NEW = "b" * 39 + "1", "b" * 39 + "2"
TRAIN = ["--max-steps", "2", "--batch-size", "4", "--per-device-train-batch-size", "4", "--max-length", "64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """base/ and other-base/, adapter/ and other-adapter/ on the first, rows.jsonl."""
    root = tmp_path_factory.mktemp("names")
    for name, seed in (("base", 0), ("other-base", 7)):
        write_base(root / name, seed=seed)
    for name, seed in (("adapter", 0), ("other-adapter", 3)):
        write_adapter(root / name, "user/base", tiny_adapter(seed))
    write_rows(root / "rows.jsonl", tiny_rows(12))
    return root


@pytest.fixture
def hub(place, tmp_path, monkeypatch):
    """user/base and user/plain, each with a commit called v1 and a newer one on main."""
    stand_in = Hub()
    turn_to(stand_in, tmp_path / "cache", monkeypatch)
    for name, commits in {
        "base": {BASE_OLD: "base", BASE_NEW: "other-base"},
        "plain": {OLD: "adapter", NEW: "other-adapter"},
    }.items():
        stand_in.commits[f"user/{name}"] = {
            commit: {path.name: path.read_bytes() for path in (place / folder).iterdir() if path.is_file()}
            for commit, folder in commits.items()
        }
        stand_in.refs[f"user/{name}"] = dict(zip(("v1", "main"), commits))
    yield stand_in
    stand_in.close()


def weights_of(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_names():
    assert parse_hub_name("user/repo") == ("user/repo", "")
    assert parse_hub_name("user/re.po-1@v1/x") == ("user/re.po-1", "v1/x")
    for text in ("repo", "a/b/c", "./a/b", "/a/b", "~/a", "a/b@", "../b"):
        assert parse_hub_name(text) is None, text
    with pytest.raises(ArtifactError, match="has no effect"):
        resolve("/some/folder", revision="v2")
    ids = ("gpt2", "a/b", "/a/b", "a/b/c", "", "../b", "a b", "a/b\n")
    assert [is_hub_id(text) for text in ids] == [*(True, True), *(False,) * 6]
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = f"/home/me/.cache/huggingface/hub/models--user--repo/snapshots/{commit}"
    assert hub_source(cached) == f"user/repo@{commit}"
    assert hub_source(cached + "/adapter") == f"user/repo@{commit}/adapter"
    assert hub_source("runs/gated") == "runs/gated"


def test_a_name_is_taken_apart(tmp_path, monkeypatch):
    assert ModelRef.parse("user/base@v1") == ModelRef("user/base", "v1")
    assert ModelRef.parse("user/base@feature/x") == ModelRef("user/base", "feature/x")
    assert ModelRef.parse("user/base", "v1") == ModelRef("user/base", "v1")
    assert ModelRef.parse("user/base@unit") == ModelRef("user/base", "", "unit")
    assert ModelRef.parse("user/base@v1@unit") == ModelRef("user/base", "v1", "unit")
    assert str(ModelRef.parse("user/base@v1@unit")) == "user/base@v1@unit"
    assert split_revision("user/base@v1", "v1") == ("user/base", "v1")
    assert split_revision("gpt2") == ("gpt2", "")
    with pytest.raises(ArtifactError, match="names a revision already"):
        ModelRef.parse("user/base@v1", "v2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "base@v1").mkdir(parents=True)
    assert ModelRef.parse("user/base@v1") == ModelRef("user/base@v1"), "a folder wins"
    assert not ModelRef.parse("user/base@v1").on_hub


def test_an_adapter_is_pinned_to_its_commit(hub, caplog):
    place = resolve("user/plain@v1", "user/base")
    assert (place.kind, place.record_name, place.hub_id) == ("adapter", f"user/plain@{OLD}", f"user/plain@{OLD}")
    assert place.adapter.name == OLD
    assert f"using user/plain@{OLD}" in caplog.text
    assert resolve("user/plain", "user/base").record_name == f"user/plain@{NEW}"
    caplog.clear()
    assert resolve(f"user/plain@{OLD}", "user/base").fingerprint == f"user/plain@{OLD}"
    assert not caplog.text, "the name already says the commit"
    base = resolve("user/base@v1")
    assert (base.kind, base.record_name) == ("base", "user/base@v1")
    with pytest.raises(ArtifactError, match=r"holds no gate_config.json and no adapter_config.json"):
        resolve("user/base@v1", expect="adapter")
    with pytest.raises(ArtifactError, match="no revision 'v9'"):
        resolve("user/plain@v9")


def test_the_revision_of_the_base(hub, place, tmp_path):
    assert resolve("user/plain@v1").base == ModelRef("user/base")
    assert resolve("user/plain@v1", "user/base@v1").base == ModelRef("user/base", "v1")
    record = json.loads((place / "adapter" / "adapter_config.json").read_text())
    shutil.copytree(place / "adapter", tmp_path / "pinned")
    (tmp_path / "pinned" / "adapter_config.json").write_text(json.dumps({**record, "revision": BASE_OLD}))
    assert resolve(tmp_path / "pinned").base == ModelRef("user/base", BASE_OLD)
    assert resolve(tmp_path / "pinned", "user/base").base == ModelRef("user/base", BASE_OLD)
    assert resolve(tmp_path / "pinned", "user/base@main").base.revision == "main", "what is asked for comes first"
    assert resolve(tmp_path / "pinned", "user/other").base == ModelRef("user/other")


def test_a_tokenizer_comes_from_the_revision(place, hub, tmp_path):
    files = hub.commits["user/base"]
    changed = json.loads(files[BASE_NEW]["tokenizer_config.json"])
    files[BASE_NEW]["tokenizer_config.json"] = json.dumps({**changed, "model_max_length": 77}).encode()
    assert open_tokenizer(resolve("user/base@v1")).model_max_length != 77
    assert open_tokenizer(resolve("user/base")).model_max_length == 77
    # a base that only the adapter's record pins is read at that commit, weights and tokenizer alike
    record = json.loads((place / "adapter" / "adapter_config.json").read_text())
    shutil.copytree(place / "adapter", tmp_path / "adapter")
    for commit, longest in ((BASE_OLD, False), (None, True)):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**record, "revision": commit}))
        options = GenerateOptions(model=str(tmp_path / "adapter"), device="cpu")
        for engine in ("transformers", "vllm"):
            assert (load_inputs(options, options.model, engine).tokenizer.model_max_length == 77) is longest, engine


def test_calibrate_records_both_commits(place, hub, tmp_path, capsys):
    command = ["calibrate", "--data", str(place / "rows.jsonl"), "--ranges=-1,1", "--skip-selection", *TRAIN]
    assert main([*command, "--adapter", "user/plain@v1", "--base", "user/base@v1", "--out", str(tmp_path / "a")]) == 0
    record = json.loads((tmp_path / "a" / "gate_config.json").read_text())
    assert (record["base"]["id"], record["base"]["revision"]) == ("user/base", BASE_OLD)
    assert (record["adapter"]["id"], record["adapter"]["revision"]) == ("user/plain", OLD)
    assert weights_of(tmp_path / "a") == (place / "adapter" / "adapter_model.safetensors").read_bytes()
    assert f"`user/plain` at `{OLD}`" in (tmp_path / "a" / "README.md").read_text()
    assert f"adapter: user/plain@{OLD}" in (tmp_path / "a" / "run" / "config.yaml").read_text()
    capsys.readouterr()
    # the folder remembers the base's commit, and --base goes before it
    assert resolve(tmp_path / "a").base.revision == BASE_OLD
    assert resolve(tmp_path / "a", "user/base@main").base.revision == "main"
    ask = ["--prompt", "w1 w2", "--max-new-tokens", "6", "--temperature", "0"]
    answers = []
    for more in ([], ["--base", "user/base@v1"], ["--base", str(place / "base")]):
        assert main(["generate", "--model", str(tmp_path / "a"), *more, *ask]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2]
    assert main(["generate", "--model", str(tmp_path / "a"), "--base", "user/base", *ask]) == 2, "another base"
    capsys.readouterr()

    assert main([*command, "--adapter", "user/plain@nowhere", "--out", str(tmp_path / "b")]) == 2
    assert "no revision 'nowhere'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "b" / "gate_config.json").exists()


def test_a_base_on_the_hub_that_holds_an_adapter_is_refused(place, hub, tmp_path, capsys):
    both, commit = [place / "base", place / "adapter"], "c" * 40
    files = {path.name: path.read_bytes() for folder in both for path in folder.iterdir() if path.is_file()}
    hub.commits["user/both"], hub.refs["user/both"] = {commit: files}, {"main": commit}
    for name in ("user/both", "user/plain@v1"):
        plain = name.partition("@")[0]
        line = ["--data", str(place / "rows.jsonl"), "--out", str(tmp_path / "out"), *TRAIN]
        assert main(["sft", "--model", name, *line]) == 2
        assert f"the base {name} holds an adapter (adapter_config.json)" in " ".join(capsys.readouterr().err.split())
        write_adapter(tmp_path / "second", plain)
        assert main(["generate", "--model", str(tmp_path / "second"), "--prompt", "w1"]) == 2
        assert f"loragate export {plain} --to merged" in " ".join(capsys.readouterr().err.split())
