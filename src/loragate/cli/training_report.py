"""What the commands that train say of their rows and steps before they begin, and the settings that they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from loragate.cli.arguments import resolved_yaml
from loragate.cli.options import RunOptions
from loragate.data import EncodedRows, ending_health, preview
from loragate.display import pluralize
from loragate.files import write_text
from loragate.training.settings import TARGET_STEPS, TrainSettings
from loragate.training.strategy import detect_launch, process_state

FEW_STEPS, FEW_ROWS = 20, 8


def say_steps(out: Console, asked: TrainSettings, rows: int, of: str = "") -> None:
    """How many steps `rows` rows give, and what was chosen where the settings `asked` leave it to the rows."""
    settings = asked.fitted(rows, detect_launch().processes)
    times = "one epoch" if settings.num_train_epochs == 1 else f"{settings.num_train_epochs:g} epochs"
    steps = settings.steps(rows)
    batches, taken = (
        f"{pluralize(rows, 'row')} in batches of {min(settings.batch_size, rows)}",
        pluralize(steps, "step"),
    )
    text = f"{batches}, {times}: {taken}{of}"
    if settings.max_steps:
        text = f"{batches}: {taken}{of}, as --max-steps asks"
    elif not asked.batch_size and asked.num_train_epochs:
        text += f" (chosen for about {TARGET_STEPS} steps or more; --batch-size changes it)"
    elif not asked.batch_size:
        most = f"in at most {pluralize(settings.MAX_EPOCHS, 'epoch')}"
        text += (
            f" (chosen for about {TARGET_STEPS} steps or more, {most}; --batch-size and --num-train-epochs change it)"
        )
    out.print(text)
    if rows < FEW_ROWS:
        out.print(f"warning: fewer than {FEW_ROWS} rows teach nothing that holds for other prompts")
    if steps < FEW_STEPS:
        out.print(
            f"note: fewer than {FEW_STEPS} steps hardly change a model; more examples, more --num-train-epochs or a smaller "
            "--batch-size help"
        )


def show_data(out: Console, encoded: EncodedRows, tokenizer: Any) -> None:
    """The rows and their tokens, and one row with its response mask coloured; `encode_rows` has warned of what was left out."""
    summary = encoded.summary
    out.print(
        f"data: {pluralize(len(encoded), 'row')} ({summary.format}), {summary.response_tokens:,} response tokens of "
        f"{summary.response_tokens + summary.prompt_tokens:,}"
    )
    if summary.template_kwargs:
        out.print(
            f"note: {summary.template_kwargs} rows give variables to the chat template (chat_template_kwargs); generation is "
            "not given them: set them at the beginning of a template for --chat-template as well"
        )
    if summary.plain and tokenizer.chat_template is not None:
        out.print(
            "note: prompt and completion are used as plain text, without the chat template; generate with --raw to match, or "
            "give the rows as messages"
        )
    unknown = tokenizer.unk_token_id  # byte-level tokenizers know every text and have none
    if unknown is not None:
        share = sum(row["input_ids"].count(unknown) for row in encoded) / max(
            1, summary.response_tokens + summary.prompt_tokens
        )
        if share > 0.01:
            out.print(f"warning: {100 * share:.0f} % of the tokens are unknown to the tokenizer; is it the right one?")
    out.print("first row in training order, response between ⟦ and ⟧:")
    out.print(preview(encoded[0], tokenizer))


def warn_about_endings(out: Console, tokenizer: Any, encoded: EncodedRows, base: Any) -> None:
    """Say so if trained turns end where generation would not stop."""
    for problem in ending_health(tokenizer, list(encoded), base.generation_config).problems:
        out.print(f"warning: {problem}")


def keep_configuration(options: RunOptions, folder: Path) -> None:
    """The resolved settings, as a file that `--config` reads; a run that goes on keeps the file that it began with."""
    path = folder / "run" / "config.yaml"
    if process_state().is_main_process and not (options.resume and path.is_file()):
        write_text(path, resolved_yaml(options))
