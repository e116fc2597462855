"""Tasks: what is asked, where the questions come from, how an answer is read and judged.

    task         the frozen description of one task, its fingerprint, YAML files to tasks; types of columns, and templates
    questions    rows from a file, the hub or a generator to questions
    arithmetic   a generated suite that no model can have seen

A task is one file in `definitions/`, or one of the user's own. Nothing here samples, grades
mathematics or programs, or needs torch.
"""

from loragate.evaluation.tasks.questions import Question, Questions, load_questions
from loragate.evaluation.tasks.task import Task, load_task, suite, task_names

__all__ = ["Question", "Questions", "Task", "load_questions", "load_task", "suite", "task_names"]
