"""Shared by the tests of selection: questions, and an engine whose answers the test decides."""

import json

from loragate.errors import GateError
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question
from loragate.gates.attach import attached_config, gate_parameters
from loragate.generation import Sample, SamplingConfig
from loragate.selection.probe import Probe
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
    """What acts: (L, U) of attached gates, "λ=0.5" where it is one for all, None for the plain adapter."""
    try:
        config = attached_config(model)
    except GateError:
        return None
    if config.granularity == "module":
        bias = next(iter(gate_parameters(model).values()))
        return f"λ={round(float(config.signed_map(bias)), 3) + 0.0:g}"
    return config.lower, config.upper


class FakeEngine:
    """Answers "w3" to `right[acting gates]` questions, spread over all; `ended` and `tokens` by gates as well.

    A key (gates, temperature) counts before the gates alone, and what is not named is as right as `other`. `retained` are
    the right ones of `RETAINED` questions, and `wrong` what is said to the others.
    """

    def __init__(self, model, right, ended=None, tokens=None, retained=None, other=0, wrong=None):
        self.model, self.right, self.ended, self.tokens = model, right, ended or {}, tokens or {}
        self.retained, self.other, self.wrong = retained or right, other, wrong or {}
        self.asked = []

    def generate(self, prompts, config, on_progress=None, *, pending=None, on_samples=None):
        key = acting(self.model)
        pairs = [(question, index) for question in range(len(prompts)) for index in range(config.samples)]
        pairs = pairs if pending is None else sorted(pending)
        self.asked.append((key, config.temperature, len({question for question, _ in pairs})))
        table = self.retained if len(prompts) == RETAINED else self.right
        right = table.get((key, config.temperature), table.get(key, self.other))
        if on_progress is not None:
            on_progress(len(pairs), len(pairs))
        return [
            sample(
                question,
                index,
                "w3" if question * 37 % len(prompts) < right else self.wrong.get(key, "w9"),
                self.tokens.get(key, 3),
                question >= self.ended.get(key, 0),
            )
            for question, index in pairs
        ]


def probe(count=32, samples=2, seed=1):
    return put(probe_task("exact"), questions(count), SamplingConfig(samples=samples, seed=seed), "probe.jsonl")


def put(task, asked, sampling, source="x"):
    """Questions as they are put to a model, their prompts rendered already."""
    prompts = tuple(question.prompt for question in asked)
    return Probe(task, tuple(asked), prompts, sampling, GradingSettings(), source)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
