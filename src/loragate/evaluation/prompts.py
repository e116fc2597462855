"""From questions to the exact texts that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loragate.data import Chat, prompt_ids
from loragate.errors import ConfigError
from loragate.evaluation.tasks import Question, Task


def render_questions(task: Task, questions: Sequence[Question], tokenizer: Any, system: str = "none") -> list[str]:
    """The prompts of a task, ready to be tokenised without special tokens.

    Args:
        task: says whether the chat template is used, and with which system message.
        questions: their `prompt` is the user's turn, or the whole text where the task is raw.
        tokenizer: with the chat template of the model.
        system: "none" leaves out a system message that the template would slip in, "keep" leaves the template alone.

    Raises:
        ConfigError: where the tokenizer has no chat template and the task needs one.
    """
    if task.raw:
        begin = tokenizer.bos_token_id
        return [
            tokenizer.bos_token + question.prompt
            if begin is not None and begin in prompt_ids(question.prompt, tokenizer)[:1]
            else question.prompt
            for question in questions
        ]
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{task.name} asks through a chat template and the tokenizer has none; give one with --chat-template FILE (in "
            "Python: tokenizer.chat_template = TEXT)"
        )
    chat = Chat(tokenizer, system)
    head = [{"role": "system", "content": task.system}] if task.system else []
    return [
        chat.render([*head, {"role": "user", "content": question.prompt}], tools=None, generation_prompt=True)
        for question in questions
    ]
