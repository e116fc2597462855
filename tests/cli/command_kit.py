"""What several tests of the commands give them: a task of one's own, and the flags of a short training."""

TRAINING = [
    *("--batch-size", "10", "--per-device-train-batch-size", "10", "--max-length", "64"),
    *("--k", "20", "--learning-rate", "5e-2"),
]


def words_task(question="prompt", *, samples=2, tokens=3, version=1):
    """A task's file; answers are compared as they stand, and the questions lie in words.jsonl, in the column of this name."""
    return f"""\
name: words
version: {version}
suite: math
dataset: {{file: words.jsonl, schema: {{{question}: text, answer: text}}}}
columns: {{question: [{question}], gold: [answer]}}
prompt: "{{{{ question }}}}"
generation: {{samples: {samples}, temperature: 1.0, max_new_tokens: {tokens}}}
grader: exact
"""
