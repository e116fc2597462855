"""Tasks: what is asked, where the questions come from, how an answer is read and judged.

    task         the frozen description of one task, and its fingerprint
    reading      YAML files to tasks; every mistake is named with file and key
    schema       types of a data set's columns, checked row by row
    templates    prompts and golds from rows, in a sandboxed template language
    questions    rows from a file, the hub or a generator to questions
    retention    rows of the suites that lm-evaluation-harness asks
    arithmetic   a generated suite that no model can have seen
    generated    sets made on the spot, and the verifier of the tiny world

A task is one file in `definitions/`, or one of the user's own. This room asks and reads; it neither samples nor grades
mathematics or programs, and it needs no torch.
"""

from loragate.evaluation.tasks.questions import load_questions
from loragate.evaluation.tasks.reading import load_task, suite, task_names
from loragate.evaluation.tasks.task import Dataset, Generation, Harness, Question, Questions, Task
from loragate.evaluation.tasks.templates import prompts_hash

__all__ = [
    "Dataset",
    "Generation",
    "Harness",
    "Question",
    "Questions",
    "Task",
    "load_questions",
    "load_task",
    "prompts_hash",
    "suite",
    "task_names",
]
