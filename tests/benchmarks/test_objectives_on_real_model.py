"""The trials of objectives on the study's real model, on a tiny random one: losses wired rightly, and work that goes on."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from loragate.gates import GateConfig, attach_gates, gate_parameters
from loragate.gates.attach import gate_modules
from loragate.generation import Sample
from loragate.models import Loading, open_model, resolve
from objectives import learning, losses, report
from objectives.real import CONTENDERS, RealCell, measure, run_cell
from tiny import write_adapter, write_base


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """A smoke cell whose adapter is random and whose verdicts are the parity of an answer's first token."""
    base, design = tmp_path / "base", measure.read_design()
    write_base(base)
    study = measure.Cell(design, "clean", 0, base, tmp_path / "study", "fp32", smoke=True)
    write_adapter(study.folder / "LoRA", base)
    (study.folder / "LoRA" / "run").mkdir()
    (study.folder / "LoRA" / "run" / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    loaded = open_model(resolve(study.folder / "LoRA", base), Loading(dtype="float32", device="cpu"))
    made = RealCell(study, loaded, tmp_path / "out")
    made.max_new_tokens = study.settings["max_new_tokens"] = 6
    monkeypatch.setattr(made, "_judge", lambda sample, question: (sample.token_ids[0] % 2 == 0, sample.text or None))
    # in this process, as starting graders takes seconds
    monkeypatch.setattr(measure, "judge", lambda task, asked, drawn, grader: [Verdict(one) for one in drawn])
    return made


class Verdict:
    def __init__(self, sample: Sample) -> None:
        self.correct = len(sample.text) % 2 == 0


def fresh_gates(cell, size=0.0):
    model = attach_gates(copy.deepcopy(cell.frozen), GateConfig(*learning.RANGE, seed=0))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in gate_parameters(model).values():
            parameter.normal_(0, size) if size else parameter.zero_()
    return cell.scorer(model)


def test_prompts_of_practice_are_those_that_the_references_answer(cell):
    for prompt, row in zip(cell.practice_ids, cell.references):
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"][: len(prompt)] == [-100] * len(prompt)
    assert len(cell.references) == 480


def test_gates_at_zero_prefer_nothing_and_have_no_divergence(cell):
    pairs = learning.pairs(cell, "gold")
    assert pairs
    for better, worse, weight in pairs:
        right = [cell.judge(sample_of(row), 0)[0] for row in (better, worse)]
        assert right == [True, False]
        assert weight in (1.0, 0.5)
    cell.sequences = 2 * len(pairs)  # all pairs in a step
    scorer = fresh_gates(cell)
    loss = learning.flips(cell, scorer, "gold")(0.0).item()
    # −log σ(0) and the adapter's own mean log-probability are all that is left
    scored = cell.scored_by_adapter([better for better, _, _ in pairs])
    lengths = scored.summed(torch.ones(len(scored.labels)), len(pairs))
    mean = scored.summed(scored.log_probs(), len(pairs)) / lengths
    weights = torch.tensor([weight for _, _, weight in pairs])
    assert loss == pytest.approx(float((weights * (math.log(2) - mean)).mean()), abs=1e-4)
    found = cell.score(scorer, [worse for _, worse, _ in pairs])
    before = cell.scored_by_adapter([worse for _, worse, _ in pairs])
    assert losses.kl_from(before.logits, found.logits).max().item() < 1e-5
    assert learning.flips(cell, fresh_gates(cell, 0.5), "gold")(0.0).item() != pytest.approx(loss, abs=1e-3)


def sample_of(row):
    answer = tuple(label for label in row["labels"] if label != -100)
    return Sample(0, 0, "", answer, "stop", None)


def test_scores_are_those_of_a_plain_forward_pass(cell):
    rows = cell.references[:3]
    scorer = fresh_gates(cell, 0.5)
    batch = cell.collate(rows)
    with torch.no_grad():
        logits = scorer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        found = cell.score(scorer, rows)
    place = batch["labels"][:, 1:] != -100
    torch.testing.assert_close(found.logits, logits[place], atol=1e-4, rtol=1e-4)
    # the adapter's are kept, whatever batch they came in
    alone = torch.cat([cell.scored_by_adapter([row]).logits for row in rows])
    torch.testing.assert_close(cell.scored_by_adapter(rows).logits, alone)


def test_shuffled_verdicts_are_those_of_the_prompts_in_another_order(cell):
    gold, shuffled = learning.verdicts(cell, "gold"), learning.verdicts(cell, "shuffled")
    assert sorted(gold) == sorted(shuffled)
    assert gold != shuffled
    for better, worse, _ in learning.pairs(cell, "shuffled"):
        assert better["input_ids"] != worse["input_ids"]


def test_votes_put_the_majority_in_the_place_of_the_label():
    class Voters(learning.Learner):
        def judge(self, sample, question):
            return False, sample.text

    voters = Voters()
    # five of eight, all but unanimous, too close
    voters.practised = [(stating("a"), [*map(stating, said)]) for said in ("bbbbbaac", "aaaaaaaa", "abcdefgh")]
    assert learning.verdicts(voters, "votes") == [[False, *[True] * 5, *[False] * 3], [], []]


def stating(text):
    return Sample(0, 0, text, (), "stop", None)


def test_every_contender_learns_and_answers_and_a_stopped_run_goes_on(cell, tmp_path, monkeypatch, capsys):
    drawn = tuple(name for name in CONTENDERS if not name.endswith("votes"))  # eight prompts hold no close vote
    record = measure.Record(tmp_path / "records" / "clean-0.jsonl.gz")
    with pytest.raises(measure.OutOfTime):
        run_cell(cell, record, measure.Budget(0))
    run_cell(cell, record, measure.Budget(10), drawn)
    whats = ["training", "test T=0", "test T=0.3", "test T=1"]
    assert list(record.lines) == [(name, what) for name in drawn for what in whats]
    for name in drawn:
        found = record.lines[name, "training"]
        if name.startswith("f "):
            assert len(found["rounds"]) == 2
            assert len(found["constants"]) > 4  # kinds, of thirds of the layers
        else:
            assert len(found["losses"]) == (6 if name.endswith("x3") else 2)
        assert ("gates" in found) == name.startswith("gates")
        assert len(record.lines[name, "test T=0.3"]["correct"]) == 8
    assert json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))["questions"] == 8
    # with weights on file nothing is trained or drawn again
    monkeypatch.setattr("objectives.real.fit", None)
    monkeypatch.setattr("objectives.real.evolved", None)
    again = RealCell(cell.study, replace(cell.loaded), tmp_path / "out")
    again.max_new_tokens = cell.max_new_tokens
    taken = [record.lines.pop((name, "test T=1")) for name in ("gates, a flips", "f a dozen λ")]
    run_cell(again, record, measure.Budget(10), drawn)
    found = measure.Record(record.path).lines
    assert found.keys() == record.lines.keys()
    assert [found[one["method"], one["what"]]["texts"] for one in taken] == [one["texts"] for one in taken]
    # the rest of the pool, in place of the test
    run_cell(again, record, measure.Budget(10), ["gates, c margin"], rest=True)
    assert list(record.lines)[-1] == ("gates, c margin", "rest T=0")
    before = dict(cell.frozen.named_parameters())
    after = dict(cell.trained("LoRA, a flips")[0].named_parameters())
    assert {path for path in before if not torch.equal(before[path], after[path])} == {
        path for path in before if "lora_" in path
    }


def test_a_merged_candidate_says_what_gates_of_those_constants_say(cell):
    lora, gated = copy.deepcopy(cell.frozen), attach_gates(copy.deepcopy(cell.frozen), GateConfig(*learning.LIMITS))
    layers = lora.config.num_hidden_layers
    kinds = sorted({learning.kind_of(path, layers) for path in gate_modules(gated)})
    values = {kind: (-1.5, 0.0, 0.5, 2.0)[at % 4] for at, kind in enumerate(kinds)}
    learning.set_constants(gated, values)
    ids = torch.arange(3, 15).reshape(2, 6)
    before = lora(ids).logits
    with learning.merged(lora, values):
        merged = lora(ids).logits
    torch.testing.assert_close(merged, gated(ids).logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lora(ids).logits, before, atol=1e-4, rtol=1e-4)
    assert (merged - before).abs().max() > 1e-3


def test_the_search_for_a_dozen_goes_on_from_the_rounds_that_are_kept(cell, tmp_path, monkeypatch):
    kept, sizes = tmp_path / "rounds.json", {"generations": 3, "members": 3, "asked": 4}
    whole = learning.evolved(cell, copy.deepcopy(cell.frozen), **sizes, kept=kept)
    rounds = json.loads(kept.read_text(encoding="utf-8"))
    assert [len(scores) for scores in rounds] == [3, 3, 3]
    kept.write_text(json.dumps(rounds[:2]), encoding="utf-8")
    drawn, draw = [], cell.draw
    monkeypatch.setattr(cell, "draw", lambda *given: drawn.append(given) or draw(*given))
    assert learning.evolved(cell, copy.deepcopy(cell.frozen), **sizes, kept=kept) == whole
    assert len(drawn) == 3  # the last round's candidates alone


def test_the_real_cell_stands_beside_the_trials(cell, tmp_path):
    record = measure.Record(tmp_path / "records" / "clean-0.jsonl.gz")
    test = "10" * 150
    record.add({"method": "gates, a flips", "what": "test T=0", "samples": 1, "correct": test})
    (found,) = (table for name, table in report.load(real=record.path.parent).items() if name == "real clean/0")
    assert {"base", "adapter", "λ=0.5", "gates, CE", "gates, entropy on own rows", "gates, a flips"} == set(found)
    text = report.ledger({"real clean/0": found})
    rows = {parts[1].strip(): parts for line in text.splitlines() if len(parts := line.split("|")) > 7}
    assert "50.0 (+" in rows["gates, a flips"][3]
    assert rows["gates, a flips"][4].strip() == "not run"
    assert " to " in rows["gates, a flips"][7]
    assert rows["LoRA, a flips"][3].strip() == "not run"


def test_both_kinds_of_questions_stand_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RECORDS", tmp_path / "study")
    study, trial = (measure.Record(tmp_path / name / "clean-1.jsonl.gz") for name in ("study", "trial"))
    short, long = "\\boxed{1 + 1}", "\\boxed{(1 + 1) * 2}"
    for record, method, test, rest in ((study, "LoRA", "11110000", "10"), (trial, "gates, c margin", "11000000", "11")):
        for what, correct in (("test T=0", test), ("rest T=0", rest)):
            texts = [[long if verdict == "1" else short] for verdict in 8 * correct]
            record.add({"method": method, "what": what, "samples": 1, "correct": 8 * correct, "texts": texts})
    share = report.kinds.share_of_longer_rows("clean-1")
    assert 0.5 < share < 0.7
    *_, adapter, gates = report.both_kinds(tmp_path / "trial").splitlines()
    assert adapter == "| clean-1: adapter | 50.0 | 50 | 50.0 | 50 |  |  |  |"
    assert gates.startswith("| clean-1: gates, c margin | 25.0 | 25 | 100.0 | 100 | +50.0 (")
    assert gates.endswith(" | marked |")
    assert f"| {100 * (0.5 * share - 0.25 * (1 - share)):+.1f} (" in gates


def test_the_table_of_trainings_has_losses_or_rounds():
    gates = {"losses": [1.0] * 5 + [0.5] * 5, "preparing_cpu_seconds": 60.0, "training_cpu_seconds": 60.0}
    dozen = {"rounds": [0.2, 0.25], "constants": {"0 down": -0.5, "0 v o": 1.5}, "training_cpu_seconds": 90.0}
    text = report.trainings(
        {"real clean/1": {"LoRA, a flips": {"training": gates}, "f a dozen λ": {"training": dozen}}}
    )
    assert "| real clean/1: LoRA, a flips | 1.000 | 0.500 | – | – | – | 2.0 |" in text
    assert "| 20.0 % in the first round | 25.0 % in the last round | 0.50 | 50 % | 50 % | 1.5 |" in text
