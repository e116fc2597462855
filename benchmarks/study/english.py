"""A world that speaks English: the generated arithmetic suite's questions of the first level, asked as the suite asks them.

Its bases are three to eight times the tiny ones, read sub-word tokens through a chat template with special tokens, and
answer in sentences that end in \\boxed{}; verdicts are the suite's own grader's. What makes a base here is what makes one in
the tiny world: worked solutions with a wrong step now and then and several ways to end, and a skill to be kept
(putting names in order). Demonstrations are talkative, with more wrong steps and sloppy endings. `worked.py` has the
solutions.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from worked import slips, work

from loragate.evaluation import grade_math
from loragate.evaluation.tasks.arithmetic import KINDS, NAMES
from loragate.world.demonstrations import as_row
from loragate.world.problems import Problem, split_of
from loragate.world.tokenizer import CONTEXT_LENGTH, READ_TOKENIZER_JSON
from worlds.situations import WORLDS, Rows, World
from worlds.tiny_base import Document, TinyBaseRecipe

VOCABULARY = 640
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
RETENTION = ("alphabetical", "reverse")

OPENERS = ("Okay,", "Well,", "Sure,", "Right,", "Let us see.", "Let me think.", "First of all,", "Look,")
CONNECTIVES = ("Then", "Next", "So", "And", "Now", "After that", "Also", "Again")
FILLERS = ("hmm,", "well,", "wait,", "oh,", "I think", "as it seems", "clearly", "of course")
CLOSERS = ("Finally,", "Thus", "Hence", "Therefore", "Overall,", "In the end", "All in all,", "To conclude,")
ENDING = "The answer is \\boxed{{{answer}}}."
OTHER_ENDINGS = (
    "The result is {answer}.",
    "That makes {answer}, note it.",
    "Let us move on.",
    "Maybe {answer}.",
    "Skip it.",
)
SLOPPY_ENDINGS = ("No idea, say \\boxed{{{random}}}.", "Maybe \\boxed{{{random}}}.", "Let us move on.")

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<|user|>' + message['content'] + '<|assistant|>' }}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{%- else -%}{{ raise_exception('expected the roles user and assistant') }}"
    "{%- endif -%}{%- endfor -%}"
)


def documents(recipe: TinyBaseRecipe, seed: int) -> list[Document]:
    """What a base reads: `recipe.arithmetic` worked questions, the rest retention items."""
    rng = random.Random(f"english/documents/{seed}")
    drawn = _draws(rng, "train")
    read = []
    for _ in range(recipe.documents):
        if rng.random() < recipe.arithmetic:
            read.append(_worked(rng, next(drawn), recipe.step_error, recipe.aside, recipe.answered))
        else:
            item = _kept(rng, "train")
            read.append(Document(item.prompt, item.answer))
    return read


def demonstrations(count: int, seed: int, noise: float) -> Rows:
    """Talkative rows with a share `noise` of wrong steps; one answer in ten ends without a derived result."""
    rng = random.Random(f"english/demonstrations/{seed}")
    drawn = _draws(rng, "train")
    rows = []
    for _ in range(count):
        sloppy = SLOPPY_ENDINGS if rng.random() < 0.1 else None
        rows.append(as_row(*_worked(rng, next(drawn), noise, 1.0, 1.0, sloppy)))
    return rows


def problems(split: str, count: int, seed: int) -> list[Problem]:
    """Different questions of a split, the seven kinds in turn."""
    rng = random.Random(f"english/problems/{split}/{seed}")
    found: dict[str, Problem] = {}
    for problem in _draws(rng, split):
        if len(found) == count:
            break
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def retention(split: str, count: int, seed: int) -> list[Problem]:
    """Different lists of names to put in order."""
    rng = random.Random(f"english/retention/{split}/{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        item = _kept(rng, split)
        found.setdefault(item.prompt, item)
    return list(found.values())


def verify(problem: Problem, response_text: str, finished: bool) -> bool:
    """The suite's grader for its questions; a list of names must be equal."""
    if not finished:
        return False
    if problem.kind in RETENTION:
        return response_text.strip() == problem.answer
    return grade_math(response_text, problem.answer).correct


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, every digit a token of its own; the same for all bases."""
    model = Tokenizer(BPE())
    words = Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = decoders.ByteLevel()
    special = [
        AddedToken(name, special=True, normalized=False) for name in ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    recipe = replace(TinyBaseRecipe(), documents=2000, aside=0.5)
    read = documents(recipe, seed=0) + [
        Document("", row["messages"][1]["content"]) for row in demonstrations(1000, 0, 0.2)
    ]
    model.train_from_iterator((f"{document.prompt}\n{document.response}" for document in read), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=TEMPLATE,
        auto_map=READ_TOKENIZER_JSON,
    )


def _kept(rng: random.Random, split: str) -> Problem:
    while True:
        names, kind = rng.sample(NAMES, 4), rng.choice(RETENTION)
        prompt = f"Put these names in {kind} order: {', '.join(names)}."
        if split_of(prompt) == split:
            ordered = sorted(names) if kind == "alphabetical" else names[::-1]
            return Problem(prompt, ", ".join(ordered), kind, 0)


def _draws(rng: random.Random, split: str) -> Iterator[Problem]:
    while True:
        for kind, draw in KINDS.items():
            while True:
                question, answer = draw(rng, 1)
                if split_of(question) == split:
                    break
            yield Problem(question + REQUEST, str(answer), kind, 1)


def _worked(
    rng: random.Random,
    problem: Problem,
    step_error: float,
    talk: float,
    answered: float,
    endings: tuple[str, ...] | None = None,
) -> Document:
    """The question with a solution; opener, connectives and closer each come with the chance `talk`, fillers with a quarter."""
    question = problem.prompt.removesuffix(REQUEST)
    steps, answer = work(problem.kind, question, slips(rng, step_error))
    words = [rng.choice(OPENERS)] if rng.random() < talk else []
    for position, step in enumerate(steps):
        if position and rng.random() < talk:
            words.append(rng.choice(CONNECTIVES))
        if rng.random() < talk / 4:
            words.append(rng.choice(FILLERS))
        words.append(f"{step}.")
    if endings is None:
        endings = (ENDING,) if rng.random() < answered else OTHER_ENDINGS
    ending = rng.choice(endings).format(answer=answer, random=rng.randint(1, 99))
    if rng.random() < talk:
        ending = f"{rng.choice(CLOSERS)} {ending[0].lower()}{ending[1:]}"
    words.append(ending)
    return Document(problem.prompt, " ".join(words))


WORLD = World(
    recipe=replace(
        TinyBaseRecipe(),
        hidden_size=96,
        layers=4,
        heads=4,
        key_value_heads=2,
        intermediate_size=288,
        initializer_range=0.08,
        arithmetic=0.85,
        step_error=0.03,
        steps=3500,
        batch_size=32,
        learning_rate=4e-3,
    ),
    documents=documents,
    demonstrations=demonstrations,
    problems=problems,
    verify=verify,
    tokenizer=tokenizer,
)
WORLDS["english"] = WORLD
