"""`loragate generate`: text from a gated folder, a plain adapter or a base."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loragate import models
from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions
from loragate.display import Display, format_temperature
from loragate.errors import ConfigError
from loragate.gates.recommended import chosen_temperature, form_note, sampling_note
from loragate.printable import escape_for_terminal
from loragate.validate import PositiveInt

if TYPE_CHECKING:
    from loragate.generation import Sample


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Settings of `loragate generate`.

    Attributes:
        model: gated folder, PEFT adapter or base model, or owner/name[@revision] of one on the hub; an override of λ may stand
            behind it: @off, @unit, @constant=0.5, @lower=0.5, @clip=-1:2.
        prompt: the user's turn; "-" reads it from standard input.
        prompts: file with one prompt per line, instead of prompt.
        raw: pass the prompt to the model unchanged, without the chat template.
        samples: answers per prompt.
        temperature: sampling temperature; 0 is greedy. Without it that which the folder recommends, or 1.
        top_p: nucleus sampling threshold.
        max_new_tokens: token limit of an answer. An answer ends at the model's last position, too.
        seed: seed of the sampling.
        batch_size: sequences generated at a time.
        base: where the base model is, instead of the recorded one.
        json: one JSON object per answer instead of text.
    """

    model: str
    prompt: str = ""
    prompts: str = ""
    raw: bool = False
    samples: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    batch_size: PositiveInt = 16
    base: str = ""
    json: bool = False


def run(options: GenerateOptions) -> int:
    """Generate and print, answer by answer; finish reasons go to stderr."""
    texts = read_prompts(options)
    from loragate.data import describe_form, is_same_form, prompt_ids, render_prompt
    from loragate.gates.override import NAMED_OVERRIDES
    from loragate.generation import SamplingConfig, TransformersEngine
    from loragate.generation.engine import Prompts

    source = models.resolve(options.model, options.base, allow_override=True)
    temperature = chosen_temperature(source.sampling, options.temperature)
    if options.temperature is None and temperature == 0 and options.samples > 1:
        raise ConfigError(
            f"--samples {options.samples}: {options.model} recommends greedy decoding, one answer each; give --temperature"
        )
    sampling = SamplingConfig(temperature, options.top_p, options.max_new_tokens, options.samples, options.seed)
    if note := sampling_note(options.model, source.sampling, options.temperature):
        print(f"loragate: {note}", file=sys.stderr)
    elif options.temperature is None:
        print(f"loragate: sampling {format_temperature(temperature)}; --temperature 0 is greedy", file=sys.stderr)
    if source.override not in (None, NAMED_OVERRIDES["off"]) and (note := models.unreached_note(source)):
        print(f"loragate: {note}", file=sys.stderr)
    loaded = models.open_model(source, options)
    tokenizer = loaded.tokenizer
    prompts: Prompts
    if options.raw:
        prompts = [prompt_ids(text, tokenizer) for text in texts]
    elif tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; give one with --chat-template FILE, or complete texts with --raw"
        )
    else:
        conversations = [[{"role": "user", "content": text}] for text in texts]
        prompts = [render_prompt(talk, tokenizer, system=options.system) for talk in conversations]
    now = describe_form(options.raw, system=options.system)
    if note := form_note(options.model, source.sampling, now, partial(is_same_form, tokenizer=tokenizer)):
        print(f"loragate: warning: {note}", file=sys.stderr)
    answers, wanted = _Answers(options), len(prompts) * sampling.samples
    engine = TransformersEngine(loaded.model, tokenizer, options.batch_size)
    # on a terminal the answers themselves are the progress
    watched = wanted > 1 and not sys.stdout.isatty()
    with answers, Display().job("generating", wanted, "answer") if watched else nullcontext() as shown:
        samples = engine.generate(prompts, sampling, shown, on_samples=answers)
    cut = sum(sample.finish_reason == "length" for sample in samples)
    if cut:
        print(
            f"loragate: {cut} of {len(samples)} answers reached the limit of {sampling.max_new_tokens} tokens, or the model's "
            "last position",
            file=sys.stderr,
        )
    return 0


class _Answers(AbstractContextManager["_Answers"]):
    """Prints answers in the order of the prompts, each as soon as those before it are drawn: the longest prompts are drawn first.

    Where generating ends early, --json also prints what was drawn beyond a gap, as each line names its prompt.
    """

    def __init__(self, options: GenerateOptions) -> None:
        self.json, self.samples = options.json, options.samples
        self.drawn: dict[tuple[int, int], Sample] = {}
        self.next = (0, 0)
        # a file gets the answers as they are; on a terminal they must not act
        self.shown = escape_for_terminal if sys.stdout.isatty() else str

    def __call__(self, batch: Sequence[Sample]) -> None:
        self.drawn |= {(sample.question, sample.sample): sample for sample in batch}
        while self.next in self.drawn:
            self._print(self.drawn.pop(self.next))
            question, sample = self.next
            self.next = (question, sample + 1) if sample + 1 < self.samples else (question + 1, 0)

    def __exit__(self, *error: object) -> None:
        for place in sorted(self.drawn) if self.json else ():
            self._print(self.drawn[place])

    def _print(self, sample: Sample) -> None:
        if not self.json:
            print(self.shown(sample.text), flush=True)
            return
        record = {
            "prompt": sample.question,
            "sample": sample.sample,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "tokens": len(sample.token_ids),
            "entropy": None if sample.entropy is None else round(sample.entropy, 4),
        }
        print(self.shown(json.dumps(record, ensure_ascii=False)), flush=True)


def read_prompts(options: GenerateOptions) -> list[str]:
    """The prompts of the command line."""
    if bool(options.prompt) == bool(options.prompts):
        raise ConfigError("give either --prompt TEXT or --prompts FILE")
    if options.prompt:
        return [sys.stdin.read().strip() if options.prompt == "-" else options.prompt]
    try:
        # some editors begin a file with a mark of its encoding (BOM); a prompt may hold U+2028
        lines = Path(options.prompts).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"--prompts {options.prompts}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"--prompts {options.prompts}: line {line} is not UTF-8 text; save the file as UTF-8"
        ) from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {options.prompts}: the file holds no prompt")
    return prompts


COMMAND = Command(
    name="generate",
    options=GenerateOptions,
    run=run,
    examples=(
        'loragate generate --model gated --prompt "What is 7 * 8?"',
        'loragate generate --model gated@constant=0.5 --prompt "What is 7 * 8?"',
        "loragate generate --model gated --prompts questions.txt --samples 4 --temperature 0.6 --json",
    ),
    common="prompt prompts raw samples temperature max_new_tokens seed base dtype quantization device json",
)
