"""Every method of the paper by its flags, what the run folder and the artifact say of it, and flags that contradict."""

import json

import pytest
import torch

import loragate as lg
from loragate.errors import ConfigError
from loragate.gates.schema import read_gate_config
from tiny import run, tiny_adapter, tiny_base, write_adapter

COMMON = ["--batch-size", "8", "--per-device-train-batch-size", "8", "--max-length", "64", "--max-steps", "2"]


@pytest.fixture(scope="module")
def place(made, tmp_path_factory):
    root = tmp_path_factory.mktemp("methods")
    for name, source in (("base", "base"), ("adapter", "adapter"), ("rows.jsonl", "messages.jsonl")):
        (root / name).symlink_to(made / source)
    return root


def sft(place, out, *more):
    return ("sft", "--model", place / "base", "--data", place / "rows.jsonl", *COMMON, "--out", out, *more)


def calibrate(place, out, *more, adapter=None):
    data = (
        "--adapter",
        adapter or place / "adapter",
        "--data",
        place / "rows.jsonl",
        *COMMON,
        "--learning-rate",
        "0.05",
    )
    return ("calibrate", *data, "--ranges=-3,2", "--skip-selection", "--out", out, *more)


def identity(folder):
    return json.loads((folder / "run" / "run.json").read_text())


@pytest.mark.parametrize(
    ("flags", "constants"),
    [
        (["--objective", "eksft", "--objective-options", '{"ratio": 0.5, "combine": "intersection"}'], {"ratio": 0.5}),
        (["--objective", "entropy", "--objective-options", '{"k": 0}'], {"k": 0}),
        (["--objective", "talr"], {"tau": "median", "floor": 0.01}),
    ],
)
def test_objectives_are_on_record(place, tmp_path, flags, constants):
    run(*sft(place, tmp_path / "a", *flags))
    record = identity(tmp_path / "a")
    assert record["settings"]["objective"] == flags[1]
    assert constants.items() <= record["constants"].items()
    assert record.get("reference") == ("base" if "eksft" in flags else None)


def test_a_finished_adapter_is_continued_and_only_read(place, tmp_path, capsys, fails):
    def contents():
        files = (path for path in (place / "adapter").rglob("*") if path.is_file())
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    source, adapter = contents(), ("--adapter", place / "adapter")
    run(*sft(place, tmp_path / "longer", *adapter))
    assert "which is only read: LoRA, rank 16, α 16; no new warm-up" in capsys.readouterr().out
    assert source == contents()
    config = json.loads((tmp_path / "longer" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (16, 16, True)
    record = identity(tmp_path / "longer")
    assert (record["settings"]["rank"], record["settings"]["warmup_ratio"]) == (16, 0.0)
    assert record["start"]
    assert "rank is 8, but the adapter" in fails(*sft(place, tmp_path / "x", *adapter, "--rank", "8"))
    assert "holds no adapter_config.json" in fails(*sft(place, tmp_path / "x", "--adapter", place / "base"))
    assert "is the adapter that is trained on" in fails(*sft(place, place / "adapter", *adapter))


def test_dora_says_what_can_be_done_with_it(place, tmp_path, capsys, fails):
    run(*sft(place, tmp_path / "dora", "--dora"))
    text = capsys.readouterr().out
    assert "next: loragate eval" in text
    assert "loragate calibrate" not in text
    said = fails(
        "calibrate", "--adapter", tmp_path / "dora", "--data", place / "rows.jsonl", *COMMON, "--ranges=0,1",
        "--skip-selection", "--out", tmp_path / "g",
    )  # fmt: skip
    assert "Dora variant of LoRA" in said
    assert "Gate a plain LoRA adapter" in said


@pytest.mark.parametrize(
    ("flags", "gate", "settings"),
    [
        (["--k", "0"], {}, {"k": 0, "objective": "entropy"}),
        (["--granularity", "global"], {"granularity": "global"}, {}),
        (["--objective", "ce"], {}, {"objective": "ce"}),
    ],
)
def test_gates_are_on_record(place, tmp_path, flags, gate, settings):
    run(*calibrate(place, tmp_path / "g", *flags))
    record = read_gate_config(tmp_path / "g")
    assert gate.items() <= record["gate"].items()
    assert settings.items() <= record["training"]["settings"].items()
    assert settings.items() <= identity(tmp_path / "g")["settings"].items()
    assert gate.items() <= identity(tmp_path / "g")["gate"].items()
    card = (tmp_path / "g" / "README.md").read_text()
    model = lg.load_gated(tmp_path / "g")
    if "--k" in flags:
        assert record["k"] == 160
        assert "full entropy (SCALE)" in card
    if "global" in flags:
        assert len(lg.gate_parameters(model)) == 1


def test_random_gates_stand_in_for_trained_ones_and_leave_them():
    from loragate.evaluation.variants import ModelVariant, activate_variant, variants_for

    assert [v.label for v in variants_for("gated", "full", [])] == ["adapter", "base", "gated", "gated random gates"]
    assert variants_for("adapter", "full") == variants_for("adapter", "cheap")
    for kind in ("base", "adapter", "gated"):
        assert variants_for(kind, "alone") == [ModelVariant(kind)]
    with pytest.raises(ConfigError, match="did you mean 'full'"):
        variants_for("gated", "ful")
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2, init_scale=0.5))
    ids = torch.arange(5, 15)[None]
    gated = model(input_ids=ids).logits
    found = []
    for seed in (0, 0, 1):
        with activate_variant(model, ModelVariant("gated", "random gates", random=seed), "gated"):
            found.append(model(input_ids=ids).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-3)
    assert not torch.allclose(found[0], gated, atol=1e-3)
    assert torch.equal(model(input_ids=ids).logits, gated)


def test_what_no_strength_reaches_is_said_where_one_is_applied(place, tmp_path, capsys):
    """A whole copy of a norm stays as it is at λ = 0, for which `generate` answered as if it were the base."""
    model = tiny_adapter(base=tiny_base(), modules_to_save=["norm"])
    write_adapter(tmp_path / "adapter", place / "base", model)
    said = "no strength reaches whole copies of norm (modules_to_save): the adapter keeps its full strength there"
    for override, told in (("@constant=0", True), ("@lower=0.5", True), ("@off", False), ("", False)):
        line = ("--prompt", "w1", "--temperature", "0", "--max-new-tokens", "1")
        run("generate", "--model", f"{tmp_path / 'adapter'}{override}", *line)
        assert (said in " ".join(capsys.readouterr().err.split())) is told
    run(*calibrate(place, tmp_path / "gated", adapter=tmp_path / "adapter"))
    assert f"modules; {said}" in " ".join(capsys.readouterr().out.split())
