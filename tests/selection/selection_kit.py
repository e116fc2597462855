"""Shared by the tests of selection: questions, and an engine whose answers the test decides."""

import json

from loragate.errors import GateError
from loragate.evaluation.judging import JudgeSettings
from loragate.evaluation.tasks import Question
from loragate.gates.attach import attached_config
from loragate.generation import Sample, SamplingConfig
from loragate.selection.probe import labelled_probe
from loragate.selection.questions import probe_task

RETAINED = 40


def questions(count=32, gold="w3"):
    return [
        Question(str(i), f"w{i} w{i + 1}", gold, {"prompt": f"w{i} w{i + 1}"}, f"probe.jsonl:{i + 1}")
        for i in range(count)
    ]


def sample(question, index, text, tokens=3, finished=True):
    ids = tuple(range(10, 10 + tokens))
    return Sample(question, index, text, ids, "stop" if finished else "length", None)


def acting(model):
    """(L, U) of the attached gates; None for the plain adapter, "base" where that is off."""
    if any(getattr(module, "disable_adapters", None) is True for module in model.modules()):
        return "base"
    try:
        config = attached_config(model)
    except GateError:
        return None
    return config.lower, config.upper


class FakeEngine:
    """Answers "w3" to the first `right[acting gates]` questions; `ended` and `tokens` by gates as well.

    The plain adapter at a temperature below 1 is "cooler". `retained` are the right ones of `RETAINED` questions.
    """

    def __init__(self, model, right, ended=None, tokens=None, retained=None):
        self.model, self.right, self.ended, self.tokens = model, right, ended or {}, tokens or {}
        self.retained = retained or right
        self.asked = []

    def generate(self, prompts, config, on_progress=None, *, pending=None, on_samples=None):
        key = acting(self.model)
        key = "cooler" if key is None and config.temperature < 1 else key
        self.asked.append(key)
        right = self.retained if len(prompts) == RETAINED else self.right
        if on_progress is not None:
            on_progress(len(prompts), len(prompts))
        return [
            sample(
                question,
                index,
                "w3" if question < right[key] else "w9",
                self.tokens.get(key, 3),
                question >= self.ended.get(key, 0),
            )
            for question in range(len(prompts))
            for index in range(config.samples)
        ]


def probe(count=32, samples=2, seed=1):
    asked = questions(count)
    prompts = [question.prompt for question in asked]
    return labelled_probe(
        probe_task("exact"), asked, prompts, SamplingConfig(samples=samples, seed=seed), JudgeSettings(), "probe.jsonl"
    )


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
