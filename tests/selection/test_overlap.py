"""The leak check: which questions stand among other texts, in whatever words around them."""

import sys

import pytest
from selection_kit import write_jsonl

from loragate.data import load_rows
from loragate.errors import DataError
from loragate.evaluation.tasks import Question
from loragate.selection.dev import collect_excluded_prompts, read_dev
from loragate.selection.overlap import Asked, find_overlap, is_answer, prompts_with_location
from loragate.selection.settings import DevSettings

EXACT = DevSettings(dev_grader="exact")


def rows(count=32, **more):
    return [{"prompt": f"What is {i}?", "answer": i, **more} for i in range(count)]


def train_rows(tmp_path, *prompts):
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": prompt, "completion": "1"} for prompt in prompts])
    return collect_excluded_prompts(load_rows(path), EXACT)


def test_every_shared_question_is_named_with_both_lines(tmp_path):
    path = write_jsonl(tmp_path / "dev.jsonl", rows(40))
    taken = train_rows(tmp_path, "new", "What is 7?", "what is 2", "What is 7?")
    with pytest.raises(DataError) as caught:
        read_dev(path, EXACT, "dev", taken)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith(f"{path}:3: 2 of 40 dev questions are also among the training examples")
    assert "--drop-overlap" in head
    train = tmp_path / "train.jsonl"
    assert lines == [f"{path}:3 = {train}:3", f"{path}:8 = {train}:2, {train}:4"]
    with pytest.raises(DataError, match=r"and 20 more$"):
        read_dev(path, EXACT, "dev", train_rows(tmp_path, *(f"What is {i}?" for i in range(40))))


def test_shared_questions_are_left_out_of_the_dev_set_on_demand(tmp_path):
    path = write_jsonl(tmp_path / "dev.jsonl", rows(40))
    drop = DevSettings(dev_grader="exact", drop_overlap=True)
    found = read_dev(path, drop, "dev", train_rows(tmp_path, "What is 7?", "what is 2"))
    assert len(found.questions.questions) == 38
    assert not {f"{path}:3", f"{path}:8"} & {question.place for question in found.questions.questions}
    assert found.dropped == {"the training examples": 2}
    with pytest.raises(DataError, match=r"has 20 different.*; left out: 20 also among the training examples"):
        read_dev(path, drop, "dev", train_rows(tmp_path, *(f"What is {i}?" for i in range(20))))


def test_a_long_question_inside_a_prompt_is_shared(tmp_path):
    long = "How many of the forty apples in the basket are left when nine were eaten at noon?"
    path = write_jsonl(tmp_path / "dev.jsonl", [*rows(39), {"prompt": long, "answer": 31}])
    questions = read_dev(path, EXACT).questions.questions
    others = [Asked("t:1", "What is"), Asked("t:2", f"Think. {long} Answer briefly"), Asked("t:3", long)]
    assert find_overlap(questions, others) == {f"{path}:40": ["t:3", "t:2"]}


APPLES = "Tom has {} apples and buys seven more at the market. How many apples does Tom have now?"


@pytest.mark.parametrize("asked", ["{}\nAnswer with a number.", "Solve: {}", "{} Put the answer into \\boxed{{}}."])
def test_a_long_training_question_inside_a_dev_question_is_shared(asked, tmp_path):
    given = [{"prompt": asked.format(APPLES.format(i)), "answer": i + 7} for i in range(40)]
    path = write_jsonl(tmp_path / "dev.jsonl", given)
    with pytest.raises(DataError, match=r"dev\.jsonl:6: 1 of 40 dev questions are also among the training examples"):
        read_dev(path, EXACT, "dev", train_rows(tmp_path, "new", APPLES.format(5)))
    beside = (APPLES.format(50), "Tom has 5 apples", f"{APPLES.format(5)[:-5]}nothing", f"a{APPLES.format(5)}")
    assert read_dev(path, EXACT, "dev", train_rows(tmp_path, *beside)).dropped == {}


def test_an_instruction_of_many_dev_questions_is_no_question(tmp_path):
    told = "Think about the problem step by step, and put the final answer alone into the last line."
    path = write_jsonl(tmp_path / "dev.jsonl", [{"prompt": f"{told} {i} + 1?", "answer": i + 1} for i in range(40)])
    assert read_dev(path, EXACT, "dev", train_rows(tmp_path, told)).dropped == {}


def test_the_comparison_takes_time_in_proportion_to_the_texts():
    def calls(count):
        def question(i, told=""):
            prompt = f"Below is an instruction that describes a task. {APPLES.format(i)}{told}"
            return Question(str(i), prompt, "1", {}, place=f"d:{i}")

        asked = [question(i, " Be brief." * (i % 2)) for i in range(count)]
        others = [Asked(f"t:{i}", question(i).prompt + " Think." * (i % 2)) for i in range(10 * count)]
        counted, before = [0], sys.getprofile()

        def on_event(*_):
            counted[0] += 1

        sys.setprofile(on_event)
        found = find_overlap(asked, others)
        sys.setprofile(before)
        assert len(found) == count // 2, "those without an addition"
        return counted[0]

    assert calls(80) < 2.3 * calls(40)


MARKET = "{} had {} apples, bought seven more at the market on Sunday, and gave half of them away. How many are left?"
PARTS = ("the old harbour", "a small bakery", "the river bridge", "their garden", "the night train", "a quiet library")


def sentence(i):
    """Of its own words, as sentences that are translated or judged are."""
    place, other = PARTS[i % 6], PARTS[(i // 6) % 6]
    return f"On day {i} the visitors walked from {place} to {other} and spoke about number {i * i} until late."


def given(texts, answers, place):
    return [Asked(f"{place}:{i}", text, (str(answer),)) for i, (text, answer) in enumerate(zip(texts, answers))]


def asked(texts, golds):
    return [Question(f"{i}", text, str(gold), {}, place=f"d:{i}") for i, (text, gold) in enumerate(zip(texts, golds))]


@pytest.mark.parametrize(
    ("trained", "dev"),
    [
        ("Solve the problem. {}", "Answer briefly: {}"),
        ("Solve: {}", "{}\nAnswer with a number."),
        ("Below is an instruction. Write a response.\n\n### Instruction:\n{}\n\n### Response:", "Question: {} Think."),
        ("hey, my son has this for homework, {} thanks a lot!!", "Question: {}\nAnswer:"),
    ],
)
@pytest.mark.parametrize(
    "answer", ["{}", "He gives some away.\n#### {}", "So \\boxed{{{}}} are left.", "<think>1</think>{}"]
)
def test_a_question_between_other_words_on_both_sides_is_shared(trained, dev, answer):
    texts = [MARKET.format("Tom", i) for i in range(40)]
    questions = asked(map(dev.format, texts), (3 * i + 7 for i in range(40)))
    other = [trained.format(MARKET.format("Tom", i + 100)) for i in range(40)]
    others = [*given(other, range(40), "t"), Asked("t:40", trained.format(texts[5]), (answer.format(22),))]
    ((place, (there,)),) = find_overlap(questions, others).items()
    assert place == "d:5"
    assert there.startswith("t:40 (other words around 'tom had 5 apples,bought seven more at the market")
    assert there.endswith("', with the same answer '22')")
    wrong = [*others[:-1], others[-1]._replace(answers=("23",))]
    assert find_overlap(questions, wrong) == {}, "another answer is of another question"
    assert find_overlap(questions, [*others[:-1], others[-1]._replace(answers=())]) == {}, "nothing tells"


def test_what_matched_is_said(tmp_path):
    dev = [{"prompt": f"Answer briefly: {sentence(i)} Who?", "answer": f"name {i}"} for i in range(40)]
    talk = [
        {"role": "user", "content": f"Solve the problem. {sentence(7)} Who?"},
        {"role": "assistant", "content": "Name 7."},
    ]
    train = write_jsonl(tmp_path / "train.jsonl", [{"messages": talk}])
    path = write_jsonl(tmp_path / "dev.jsonl", dev)
    taken = collect_excluded_prompts(load_rows(train), EXACT)
    with pytest.raises(DataError) as caught:
        read_dev(path, EXACT, "dev", taken)
    head, line = str(caught.value).splitlines()
    assert head.startswith(f"{path}:8: 1 of 40 dev questions are also among the training examples")
    assert line.startswith(
        f"{path}:8 = {train}:1 (other words around 'on day 7 the visitors walked from a small bakery to"
    )
    assert line.endswith("with the same answer 'name 7')")


def test_another_task_on_the_same_texts_is_no_leak():
    """Translation into two languages, two judgements of a sentence, two questions about a passage, with some answers alike."""
    texts = [sentence(i) for i in range(60)]
    german, french = ([f"{word} {i}" if i % 9 else f"Berlin {i}" for i in range(60)] for word in ("Tag", "jour"))
    yes_no = [["yes", "no"][i % 2] for i in range(60)], [["yes", "no"][i % 3 == 0] for i in range(60)]
    years = [1900 + i for i in range(60)], [1900 + i + (i % 5 > 0) for i in range(60)]
    cases = [
        ("Translate to German: {}", "Translate to French: {}", german, french),
        ("Translate {} to German", "Translate {} to French", german, french),
        ("{} Is it polite?", "{} Is it long?", *yes_no),
        ("{} Is it rude? Yes or no.", "Is this a question? {}", ["no"] * 60, ["no"] * 60),
        ("{} In which year did it begin?", "{} In which year did it end?", *years),
        ("Summarise: {}", "{} In which year?", [f"A walk, in the year {year}, by day." for year in years[0]], years[1]),
    ]
    for trained, dev, answers, golds in cases:
        questions = asked(map(dev.format, texts), golds)
        assert find_overlap(questions, given(map(trained.format, texts), answers, "t")) == {}, dev


def test_problems_from_one_mould_are_no_leak():
    """They share long texts, and sums that are equal."""
    mould = (
        "{} {} has {} apples and buys {} more at the market in the old town by the sea. How many apples are there now?"
    )
    made = [(i, j) for i in range(3, 11) for j in range(3, 11)]
    questions = asked((mould.format("Think.", "Tom", i, j) for i, j in made), (i + j for i, j in made))
    others = given((mould.format("Solve:", "Tom", i + 20, j - 2) for i, j in made), (i + j + 18 for i, j in made), "t")
    others += given((mould.format("Solve:", "Tom", j + 8, i - 8) for i, j in made), (i + j for i, j in made), "u")
    assert find_overlap(questions, others) == {}


def test_the_answers_of_every_form_of_rows_are_known():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    forms = [
        {"messages": talk},
        {"prompt": talk[:3], "completion": talk[3:]},
        {"instruction": "c", "input": "<noinput>", "output": "d"},
        {"input": "c", "output": "d"},
        {"question": "c", "answer": "d"},
        {"problem": "c", "solution": "d"},
    ]
    for row in forms:
        assert prompts_with_location(load_rows([row]))[-1] == ("row 0", "c", ("d",)), row
    assert prompts_with_location(load_rows(forms[:1]))[0] == ("row 0", "a", ("b",))


@pytest.mark.parametrize(
    ("response", "gold", "same"),
    [
        ("84", "84", True),
        ("7 times 12 are 84 eggs.", "84", True),
        ("7 times 12 are 84, or 7 boxes.", "84", False),
        ("The answer is 1,084.", "1084", True),
        ("#### 84", "6 * 14 = 84\n#### 84", True),
        ("In the end Paris.", "Paris", False),
        ("The answer is: Paris.", "paris", True),
        ("Paris was built long ago", "", False),
        ("", "84", False),
    ],
)
def test_an_answer_is_found_at_the_end_of_a_response(response, gold, same):
    assert is_answer(response, gold) is same
