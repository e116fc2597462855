"""Shared by the tests of selection: questions, and engines whose answers the test decides."""

import json
from contextlib import contextmanager

from loragate.generation import Sample

RETAINED = 40


def questions(count=32, gold="w3"):
    return [{"prompt": f"w{i} w{i + 1}", "answer": gold} for i in range(count)]


class FakeEngines:
    """In place of `evaluate.make_in_memory_engine`: answers "w3" to `right[label of a variant]` questions, spread over all.

    What is not named is as right as `other`. `retained` are the right ones of `RETAINED` questions.
    """

    def __init__(self, right, other=0, retained=None, wrong="w9"):
        self.right, self.other, self.retained, self.wrong = right, other, retained or right, wrong
        self.asked = []

    def __call__(self, model, tokenizer, kind, batch_size):
        @contextmanager
        def engine_for(variant):
            self.variant = variant
            yield self

        return engine_for

    def generate(self, prompts, config, on_progress=None, *, pending=None, on_samples=None):
        self.asked.append((self.variant.label, len(prompts)))
        table = self.retained if len(prompts) == RETAINED else self.right
        right = table.get(self.variant.label, self.other)
        found = [
            Sample(
                question,
                index,
                "w3" if question * 37 % len(prompts) < right else self.wrong,
                (10, 11, 12),
                "stop",
                None,
            )
            for question, index in sorted(pending)
        ]
        on_samples(found)
        on_progress(len(found), len(found))
        return found


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
