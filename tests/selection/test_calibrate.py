"""`calibrate` on a tiny model: what wins, what is written and attached, what a resumed one does again, what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from selection_kit import RETAINED, FakeEngines, questions

import loragate as lg
from loragate.errors import ArtifactError, ConfigError, DataError, DivergenceError, GateError
from loragate.evaluation import evaluate as evaluation
from loragate.evaluation.judging import REFERENCE_GRADERS
from loragate.gates import constant_gate
from loragate.gates.range import Range
from loragate.gates.schema import read_gate_config
from loragate.selection import DevSettings, Trial, trials
from loragate.selection.selection_run import BAND_SCALES, SCALES, SelectionRun, constant_scale_variants
from loragate.selection_record import read_selection_record
from loragate.training import GateTrainingSettings
from tiny import run, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

SETTINGS = GateTrainingSettings(
    batch_size=4, per_device_train_batch_size=4, max_steps=2, learning_rate=5e-2, k=10, max_length=64, seed=3
)
ONE, TWO = Trial(Range(-3, 1), seed=3), Trial(Range(0, 1), seed=3)
ROWS = tiny_rows(8)
GREEDY, COOL = "gated [-3,1] greedy", "gated [-3,1] T=0.3"


@pytest.fixture
def engines(monkeypatch):
    """Answers that a test decides: a call with what `FakeEngines` takes."""

    def decide(right, **more):
        fake = FakeEngines(right, **more)
        monkeypatch.setattr(evaluation, "make_in_memory_engine", fake)
        return fake

    return decide


@pytest.fixture
def trained(monkeypatch):
    """The ranges that were trained, in order."""
    done, real = [], trials.train_gates

    def counted(model, tokenizer, rows, config, *args, **options):
        done.append((config.lower, config.upper))
        return real(model, tokenizer, rows, config, *args, **options)

    monkeypatch.setattr(trials, "train_gates", counted)
    return done


def calibrate(
    out, *, model=None, ranges=(ONE, TWO), dev=None, settings=SETTINGS, retention=False, grader="exact", **more
):
    model = model or tiny_adapter()
    chosen = lg.calibrate(
        model,
        tiny_tokenizer(),
        ROWS,
        questions() if dev is None else dev,
        out,
        ranges=ranges,
        settings=settings,
        dev=DevSettings(dev_grader=grader, dev_samples=2),
        retention_dataset=questions(RETAINED) if retention else None,
        **more,
    )
    return model, chosen


def record_of(chosen):
    return chosen.evidence["selection"]


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25).reshape(2, 10)).logits


def test_the_adapter_stays_bit_for_bit_where_a_gain_may_be_chance(tmp_path, engines):
    fake = engines({"adapter greedy": 20, GREEDY: 21}, other=5)
    before = logits(tiny_adapter())
    model, chosen = calibrate(tmp_path / "out")
    found = record_of(chosen)["recommendation"]
    assert (found["label"], found["weights"], found["temperature"]) == ("adapter greedy", "adapter", 0)
    assert "may be chance" in found["reason"]
    assert read_gate_config(tmp_path / "out")["sampling"] == {"temperature": 0.0}
    assert torch.equal(logits(model), before)
    labels = [label for label, _ in fake.asked]
    assert labels.count("adapter greedy") == 1, "nothing is drawn twice"
    scales = [f"adapter λ={scale:g} greedy" for scale in SCALES]
    # of two layers one is the lower third, and one the middle
    scales += [f"adapter {band} λ={scale:g} greedy" for band in ("lower", "middle") for scale in BAND_SCALES]
    asked = {"adapter greedy", "base greedy", *scales, GREEDY, "gated [0,1] greedy"}
    asked |= {f"{one} T={heat}" for one in ("adapter", "gated [-3,1]") for heat in ("1", "0.6", "0.3")}
    assert set(labels) == asked, "the rule: all greedily, the best and the adapter at three temperatures"


def test_gates_that_win_at_a_temperature_are_written_with_it(tmp_path, engines):
    engines({"adapter greedy": 10, GREEDY: 14, COOL: 30})
    model, chosen = calibrate(tmp_path / "out")
    assert chosen.variant.label == COOL
    config = read_gate_config(tmp_path / "out")
    assert (config["gate"]["lower"], config["sampling"]["temperature"], config["training"]["steps"]) == (-3, 0.3, 2)
    kept = load_file(tmp_path / "out" / "run" / "trials" / ONE.slug / "gated" / "gates.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in lg.gate_parameters(model).items())
    rows = {row["label"]: row for row in record_of(chosen)["variants"]}
    assert rows[COOL]["samples"] == 2
    assert rows[COOL]["difference"]["z"] > 1.28
    assert rows["adapter greedy"]["difference"] is None
    said = chosen.sentences()
    assert said[0].startswith("Use the gates [-3,1], at temperature 0.3: 93.8 %")
    picked = f"It was picked from {len(rows)} settings, and the interval is that of one comparison"
    assert picked in " ".join(said)
    assert "flattered by the choice" in " ".join(said)
    card = (tmp_path / "out" / "README.md").read_text()
    assert COOL in card
    assert "93.8" in card


@pytest.mark.parametrize(
    ("label", "scale", "kind"), [("base greedy", 0.0, "base"), ("adapter λ=1.5 greedy", 1.5, "adapter")]
)
def test_one_scale_or_the_base_is_written_as_gates_of_one_value(tmp_path, engines, label, scale, kind):
    engines({"adapter greedy": 10, label: 30})
    model, chosen = calibrate(tmp_path / "out")
    assert (chosen.variant.label, chosen.variant.weights) == (label, kind)
    with lg.record_gates(model) as recorded:
        logits(model)
    assert recorded.total()["mean"] == pytest.approx(scale, abs=1e-5)


@pytest.mark.parametrize("scale", BAND_SCALES)
def test_one_scale_for_a_third_of_the_layers_is_written_and_exported(tmp_path, engines, scale):
    label = f"adapter middle λ={scale:g} greedy"
    engines({"adapter greedy": 10, label: 30})
    model, chosen = calibrate(tmp_path / "out")
    found = record_of(chosen)["recommendation"]
    assert (found["weights"], found["scale"], found["part"], chosen.variant.label) == ("scale", scale, "middle", label)
    assert chosen.sentences()[0].startswith(f"Use λ = {scale:g} in the middle third of the layers")
    plain = tiny_adapter()
    with constant_gate(plain, scale, part="middle"):
        expected = logits(plain)
    assert (logits(plain) - expected).abs().max() > 0.01
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    run("export", tmp_path / "out", "--out", tmp_path / "exported")
    exported = PeftModel.from_pretrained(tiny_base(), str(tmp_path / "exported")).eval()
    torch.testing.assert_close(logits(exported), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_one_layer_has_no_thirds():
    paths = [f"model.layers.{layer}.mlp.up_proj" for layer in range(3)]
    assert len(constant_scale_variants(paths)) == len(SCALES) + 3 * len(BAND_SCALES)
    assert len(constant_scale_variants(paths[:1])) == len(SCALES)


def test_what_clearly_loses_on_the_retention_set_is_not_taken(tmp_path, engines):
    right = {"adapter greedy": 10, GREEDY: 30, "gated [0,1] greedy": 28}
    engines(right, retained={"adapter greedy": 38, GREEDY: 4, "gated [0,1] greedy": 37})
    _, chosen = calibrate(tmp_path / "out", retention=True)
    assert chosen.variant.label == "gated [0,1] greedy"
    record = record_of(chosen)
    assert set(record["retention"]["vetoed"]) == {GREEDY}
    assert "beats adapter greedy" in record["recommendation"]["reason"]
    assert any(line.startswith(f"{GREEDY} was not taken: it loses 85.0 points") for line in chosen.sentences())
    said = [line for line in chosen.sentences() if "retention set" in line]
    assert any(
        line.startswith("On the retention set it has 92.5 % (") and "adapter greedy 95.0 % (" in line for line in said
    )
    assert any(
        line.startswith("Warning, retention set: gated [0,1] greedy scores below adapter greedy") for line in said
    )
    kept = {row["label"]: row["retention"] for row in record["variants"]}
    assert kept["gated [0,1] greedy"]["mean"] == pytest.approx(37 / 40)


def test_where_only_what_loses_on_the_retention_set_was_better_the_reason_says_so(tmp_path, engines):
    engines({"adapter greedy": 10, GREEDY: 30}, retained={"adapter greedy": 38, GREEDY: 4})
    found = record_of(calibrate(tmp_path / "out", ranges=(ONE,), retention=True)[1])["recommendation"]
    assert found["label"] == "adapter greedy"
    assert found["reason"] == "no variant that keeps the retention set scored above adapter greedy"


def test_what_speaks_against_the_questions_is_in_the_record_and_said(tmp_path, engines):
    engines({"adapter greedy": 20})
    limit = tiny_base().config.max_position_embeddings
    dev = DevSettings(dev_grader="exact", dev_samples=2, dev_max_new_tokens=limit)
    again = [*questions(), questions()[0]]
    chosen = lg.calibrate(
        tiny_adapter(), tiny_tokenizer(), ROWS, again, tmp_path / "out", ranges=(TWO,), settings=SETTINGS, dev=dev
    )
    (room,) = record_of(chosen)["dev"]["warnings"]
    assert room.startswith(f"dev: the prompts of 32 of 32 questions leave fewer than {limit} tokens")
    said = chosen.sentences()
    assert f"Warning, dev set: {room}." in said
    assert not [line for line in said if "none of it right" in line]
    assert "1 dev question was left out: also among the dev questions before them." in said


def test_programs_that_raise_were_read(tmp_path):
    def asked(grader):
        rows = {"adapter greedy": SimpleNamespace(reasons={"error": 30, "syntax": 2})}
        task = SimpleNamespace(task=SimpleNamespace(grader=grader), questions=[0] * 32, source="dev.jsonl")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "run.json").touch()
        return SimpleNamespace(evaluate_groups=lambda *_: rows, tasks={"dev": task}, folder=tmp_path)

    SelectionRun.check_grader_reads_answers(asked("humaneval"))
    with pytest.raises(DataError, match="reads an answer in none"):
        SelectionRun.check_grader_reads_answers(asked("default"))


def test_an_interrupted_call_goes_on_where_it_was(tmp_path, engines, trained, monkeypatch):
    fake = engines({"adapter greedy": 10, COOL: 30, GREEDY: 12})
    generate, drawn = FakeEngines.generate, []

    def cut_off(self, *args, **more):
        drawn.append(self.variant.label)
        if len(drawn) == 6:
            raise KeyboardInterrupt
        return generate(self, *args, **more)

    monkeypatch.setattr(FakeEngines, "generate", cut_off)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path / "out")
    assert not (tmp_path / "out" / "gate_config.json").exists()
    with pytest.raises(ConfigError, match=r"holds an earlier run.*--resume"):
        calibrate(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"run\.json was begun with training\.learning_rate"):
        calibrate(
            tmp_path / "out", settings=GateTrainingSettings(**{**vars(SETTINGS), "learning_rate": 1e-3}), resume=True
        )
    _, chosen = calibrate(tmp_path / "out", resume=True)
    assert trained == [(-3, 1), (0, 1)], "no training was done again"
    assert len(set(drawn)) == len(drawn) - 1, "what was cut off was drawn again, nothing else"
    _, whole = calibrate(tmp_path / "whole")
    assert record_of(chosen) == record_of(whole)
    assert fake.asked


def test_a_range_whose_training_diverges_drops_out(tmp_path, engines, monkeypatch):
    engines({"adapter greedy": 10}, other=12)
    real = trials.train_gates

    def sometimes(model, tokenizer, rows, config, *args, **options):
        if config.lower == -3:
            raise DivergenceError("the loss is not finite at step 1")
        return real(model, tokenizer, rows, config, *args, **options)

    monkeypatch.setattr(trials, "train_gates", sometimes)
    _, chosen = calibrate(tmp_path / "out")
    assert record_of(chosen)["diverged"] == {"[-3,1], seed 3": "the loss is not finite at step 1"}
    assert any("The training of [-3,1], seed 3 diverged" in line for line in chosen.sentences())
    with pytest.raises(DivergenceError, match="no range's training stayed finite"):
        calibrate(tmp_path / "all", ranges=(ONE,))


def test_a_dev_set_of_which_nothing_can_be_read_is_refused_before_any_training(tmp_path, trained, engines):
    engines({}, wrong="")
    with pytest.raises(
        DataError, match=r"grader 'exact' reads an answer in none of the adapter's 32 responses"
    ) as error:
        calibrate(tmp_path / "out")
    assert all(grader in str(error.value).partition("fit (")[2] for grader in REFERENCE_GRADERS), (
        "what may be used instead"
    )
    assert not trained
    engines({"adapter greedy": 20})
    assert calibrate(tmp_path / "out", ranges=(TWO,))[1].folder == tmp_path / "out", (
        "the same folder serves another grader"
    )


def test_a_retention_set_of_which_nothing_can_be_read_is_refused_too(tmp_path, trained, engines):
    engines({"adapter greedy": 32}, retained={"adapter greedy": 0}, wrong="")
    with pytest.raises(DataError, match=r"in none of the adapter's 40 responses to the retention set .*retention_task"):
        calibrate(tmp_path / "out", retention=True)
    assert not trained
    assert not [path for path in (tmp_path / "out" / "run").iterdir() if path.name != "lock"]
    # what is read and never right guards nothing either, which the record says
    engines({"adapter greedy": 10, GREEDY: 30}, retained={"adapter greedy": 0})
    _, chosen = calibrate(tmp_path / "out", ranges=(ONE,), retention=True)
    assert record_of(chosen)["retention"]["right"] == 0
    assert any("so that nothing can be lost there" in line for line in chosen.sentences())


@pytest.mark.parametrize("grader", ["default", "boxed"])
def test_answers_in_a_form_that_the_grader_does_not_read_are_refused_before_any_training(
    tmp_path, trained, engines, grader
):
    engines({}, wrong="9 * 2 = 18\n#### 18")
    with pytest.raises(DataError, match=r"\(no_box\).*gsm8k what follows ####"):
        calibrate(tmp_path / "out", grader=grader)
    assert not trained


def test_a_form_that_is_read_but_never_right_is_said(tmp_path, engines):
    """The whole response is an answer for the grader exact, so that it reads one in any form."""
    engines({}, wrong="9 * 2 = 18\n#### w3")
    _, chosen = calibrate(tmp_path / "out", ranges=(ONE,))
    assert record_of(chosen)["recommendation"]["label"] == "adapter greedy"
    warning = (
        "Warning, dev set: adapter greedy answers none of it right; does the prompt ask for the form that the grader"
    )
    assert f"{warning} 'exact' reads?" in chosen.sentences()


def test_gates_can_be_taken_without_a_dev_set(tmp_path, engines):
    fake = engines({})
    tokenizer, model = tiny_tokenizer(), tiny_adapter()
    chosen = lg.calibrate(
        model, tokenizer, ROWS, None, tmp_path / "out", ranges=(ONE,), settings=SETTINGS, skip_selection=True
    )
    assert not fake.asked
    assert chosen.sentences()[0] == (
        "The gates were taken by the user without a dev set; not compared with the plain adapter."
    )
    assert any(bool(value.any()) for value in lg.gate_parameters(model).values())
    assert "not compared with the plain adapter" in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_chosen_is_refused(tmp_path, trained):
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match=r"use it as it is, decoded greedily.*--dev-data FILE"):
        lg.calibrate(tiny_adapter(), tokenizer, ROWS, None, tmp_path / "out", settings=SETTINGS)
    with pytest.raises(ConfigError, match="takes the gates of one range as they come"):
        lg.calibrate(tiny_adapter(), tokenizer, ROWS, questions(), tmp_path / "out", skip_selection=True)
    gated = lg.attach_gates(tiny_adapter(), lg.GateConfig(-1, 2))
    with pytest.raises(GateError, match="carries gates already"):
        calibrate(tmp_path / "out", model=gated)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "gate_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="already holds a gated adapter"):
        calibrate(tmp_path / "held")
    leaking = [*questions(), {"prompt": ROWS[0]["messages"][0]["content"], "answer": "w1"}]
    with pytest.raises(DataError, match="1 of 33 dev questions are also among the training examples"):
        calibrate(tmp_path / "out", dev=leaking)
    assert not trained
    assert not (tmp_path / "out").exists()


def test_a_choice_without_the_shared_questions_says_how_many_there_were(tmp_path, engines):
    engines({"adapter greedy": 20})
    leaking = [*questions(), {"prompt": ROWS[0]["messages"][0]["content"], "answer": "w1"}]
    dev = DevSettings(dev_grader="exact", dev_samples=2, drop_overlap=True)
    chosen = lg.calibrate(
        tiny_adapter(), tiny_tokenizer(), ROWS, leaking, tmp_path / "out", ranges=(TWO,), settings=SETTINGS, dev=dev
    )
    assert record_of(chosen)["dev"]["questions"] == 32
    assert "1 dev question was left out: also among the training examples." in chosen.sentences()


def test_the_first_sentence_says_what_to_use_and_the_second_what_the_others_scored(tmp_path, engines):
    engines({"adapter greedy": 20, "base greedy": 3, GREEDY: 21, "adapter λ=0.5 greedy": 18})
    _, chosen = calibrate(tmp_path / "out")
    first, second, *rest = read_selection_record(json.loads(json.dumps(record_of(chosen)))).sentences()
    assert first.startswith("Use the adapter alone, greedily: 62.5 % (")
    assert "on 32 dev questions; gated [-3,1] greedy is above it by +3.1 points" in first
    assert second.startswith("The best of each other kind: base greedy 9.4 % (")
    assert "every kind of question" in rest[-1]


def test_an_adapter_that_is_not_shown_to_beat_its_base_is_said(tmp_path, engines):
    engines({"adapter greedy": 20, "base greedy": 19, GREEDY: 21})
    _, chosen = calibrate(tmp_path / "near")
    (said,) = (line for line in chosen.sentences() if "beat its base" in line)
    assert "on these questions: base greedy is -3.1 points (95 % interval " in said
    assert said.endswith("from adapter greedy.")
    engines({"adapter greedy": 20, "base greedy": 3, GREEDY: 21})
    _, chosen = calibrate(tmp_path / "far")
    assert not any("beat its base" in line for line in chosen.sentences())


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "norm"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3]}}, "embed_tokens"),
    ],
)
def test_where_no_lambda_reaches_all_that_was_trained_the_base_is_no_choice(tmp_path, engines, more, kept):
    engines({"adapter greedy": 20})
    found = record_of(calibrate(tmp_path / "out", model=tiny_adapter(**more), ranges=(TWO,))[1])
    assert not any(row["label"].startswith("base") for row in found["variants"])
    assert kept in found["left_out"]["base"]


@pytest.mark.parametrize(
    ("system", "said"), [("none", "without the system message that a template may add"), ("keep", "system=keep")]
)
def test_the_form_of_the_questions_is_recorded_and_said(tmp_path, engines, system, said):
    engines({"adapter greedy": 20})
    _, chosen = calibrate(tmp_path / "out", system=system)
    form = record_of(chosen)["dev"]["form"]
    assert form.startswith("through the chat template")
    assert said in form
    assert any(line.startswith(f"The dev questions were asked {form};") for line in chosen.sentences())


def test_questions_that_are_all_answered_right_are_said_to_be_too_easy(tmp_path, engines):
    engines({"adapter greedy": 32}, other=20)
    _, chosen = calibrate(tmp_path / "easy")
    assert "harder questions" in chosen.sentences()[1]
    engines({"adapter greedy": 31}, other=20)
    _, chosen = calibrate(tmp_path / "hard")
    assert not any("harder questions" in line for line in chosen.sentences())
