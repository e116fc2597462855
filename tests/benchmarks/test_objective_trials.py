import gzip
import json
import math
import re

import numpy as np
import pytest
import torch

from objectives.diagnostic import summary
from objectives.losses import (
    GREEDY,
    Pair,
    flip_pair,
    kl_from,
    margin,
    policy_gradient,
    preference,
    recombined,
)
from objectives.report import HERE, MARKERS, best_cheap, pack_diagnostic, tables


def test_a_wrong_greedy_answer_gives_way_to_the_rarest_right_sample():
    assert flip_pair(False, {0: -2.0, 2: -5.0}) == Pair(2, GREEDY, 1.0)


def test_a_right_greedy_answer_is_kept_against_the_likeliest_wrong_sample_at_half_weight():
    assert flip_pair(True, {0: -4.0, 2: -3.0}) == Pair(GREEDY, 2, 0.5)


def test_preference_by_hand():
    found = preference(
        torch.tensor([2.0, 0.0]), torch.tensor([-1.0, 0.0]), torch.tensor([-0.5, -0.2]), torch.tensor([1.0, 0.5])
    )
    first = math.log(1 + math.exp(-0.3)) + 0.5
    second = 0.5 * (math.log(2) + 0.2)
    assert float(found) == pytest.approx((first + second) / 2)


def test_policy_gradient_leaves_out_answers_without_advantage():
    found = policy_gradient(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([1.0, -0.5, 0.0]))
    assert float(found) == pytest.approx((1.0 - 1.0) / 2)
    assert float(policy_gradient(torch.tensor([-1.0]), torch.tensor([0.0]))) == 0.0


def test_margins_count_only_near_the_decision():
    logits = torch.tensor([[1.0, 0.8, 0.0], [0.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    # m = 0.2, −1, 5 and −4
    assert margin(logits, torch.tensor([0, 0, 0, 0])).tolist() == pytest.approx([0.3, 1.5, 0.0, 0.0])


def test_kl_runs_from_the_reference_and_moves_the_model_only():
    reference = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    logits = torch.zeros(1, 2, requires_grad=True)
    kl = kl_from(reference, logits)
    assert kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    kl.sum().backward()
    assert reference.grad is None
    assert logits.grad.tolist()[0] == pytest.approx([0.5 - 0.75, 0.5 - 0.25])


def test_the_better_half_of_a_population_is_kept_by_rank():
    points = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    first, second = math.log(2.5), math.log(2.5) - math.log(2.0)
    found = recombined(points, torch.tensor([0.1, 0.9, 0.5, 0.2]))
    assert float(found) == pytest.approx((first * 1.0 + second * 2.0) / (first + second))


def test_the_diagnostic_counts_wrong_prompts_that_a_sample_reaches():
    sampled = np.array([[True, False], [False, False], [False, True], [True, True]])
    stated = [["a", "b"], ["b", "b"], ["b", "a"], ["a", "a"]]
    found = summary([True, False, False, True], sampled, stated, [np.array([True, True, False, False])])
    assert (found["wrong greedily"], found["of them reached"]) == (2, 1)
    assert found["share"][0] == 50.0
    assert found["share by chance"] == 50.0
    assert found["greedy"] == 50.0
    assert found["single at T=0.8"] == 50.0
    # the first answer of a tie is elected: right, wrong, wrong, right
    assert found["majority of 8"] == 50.0
    assert found["right greedily, a wrong sample"] == 1


def record(cell, contender, dev, test):
    verdicts = {
        f"{split} T={heat}": bits for split, table in (("dev", dev), ("test", test)) for heat, bits in table.items()
    }
    return {"cell": cell, "contender": contender, "verdicts": verdicts}


def test_the_best_cheap_setting_is_chosen_on_development_questions():
    low = {"0": "10", "0.3": "1000", "0.6": "1000", "1": "0000"}
    high = {"0": "11", "0.3": "1110", "0.6": "1000", "1": "0000"}
    contenders = {
        "adapter": record("s/0", "adapter", low, high),
        "λ=2": record("s/0", "λ=2", high, low),
        "gates, CE": record("s/0", "gates, CE", {**high, "0.3": "1111"}, high),
    }
    assert best_cheap(contenders) == ("λ=2", "0")
    contenders["adapter"]["verdicts"].update({"dev T=0": "11", "dev T=0.3": "1111"})
    assert best_cheap(contenders) == ("adapter", "0")


def test_the_committed_tables_are_those_of_the_verdicts():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    shown = page.split(MARKERS[0])[1].split(MARKERS[1])[0].strip()
    assert shown == tables(), "run `python benchmarks/objectives/report.py --readme`"


def test_a_diagnostic_is_taken_up_beside_those_on_file(tmp_path):
    target = tmp_path / "diagnostic.json"
    for name, text in (("real clean-0", "a"), ("commands/0", "b"), ("real clean-0", "c")):
        place = tmp_path / text / name
        place.mkdir(parents=True)
        (place / "summary.json").write_text(json.dumps({"questions": text}), encoding="utf-8")
        sample = {"question": 0, "sample": 0, "text": text, "token_ids": [1], "finish_reason": "stop", "entropy": None}
        for kind in ("greedy", "sampled"):
            (place / f"{kind}.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
        pack_diagnostic(tmp_path / text, target)
    found = json.loads(target.read_text(encoding="utf-8"))
    assert {name: one["questions"] for name, one in found.items()} == {"real clean-0": "c", "commands/0": "b"}
    lines = gzip.decompress(target.with_suffix(".jsonl.gz").read_bytes()).decode().splitlines()
    assert [(json.loads(line)["of"], json.loads(line)["text"]) for line in lines] == [
        *[("real clean-0", "c")] * 2,
        *[("commands/0", "b")] * 2,
    ]


@pytest.mark.parametrize("page", ["benchmarks/objectives/README.md", "docs/methods.md"])
def test_what_the_pages_say_of_the_tiny_cells_is_in_the_tables(page):
    section = tables().split("### All tiny situations")[1]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith(("| gates", "| LoRA", "| f "))]
    # as written by hand: the difference from the best cheap setting, with a minus sign and no sign before zero
    measured = {re.sub(r"-(?=\d)", "−", row[-2]).replace("+0.0 ", "0.0 ").replace("−0.0 ", "0.0 ") for row in rows}
    text = (HERE.parents[1] / page).read_text(encoding="utf-8").replace("−0.0 ", "0.0 ")
    told = text[text.index("best cheap setting, points" if "README" in page else "gates: nine small adapters") :]
    found = re.findall(r"[+−]\d+\.\d \([^)]* to [^)]*\)", told.split("\n\n")[0])
    differences = found[::2] if "README" in page else found  # the second column there is against the adapter
    assert len(differences) >= 9
    assert set(differences) <= measured
