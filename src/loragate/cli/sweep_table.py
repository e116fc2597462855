"""Where every trial of a sweep stands: a live table on a terminal, elsewhere a line for each change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loragate.display import duration
from loragate.selection.store import RUNNING, Store, TrialState, Watch

BEST, FAILED_SHOWN = 5, 3
EVERY_S = 1.0


@contextmanager
def live_table(store: Store, out: Console | None = None) -> Iterator[None]:
    """Show where every trial stands while the body runs."""
    out = out or Console(stderr=True, highlight=False)
    watch, stop = Watch(store), threading.Event()
    began, known = time.monotonic(), {state.candidate.slug: state.state for state in watch.states()}
    before = sum(state == "finished" for state in known.values())
    several = len({one.adapter for one in store.study.candidates}) > 1

    def show() -> None:
        terminal = Live(console=out, auto_refresh=False, transient=True) if out.is_terminal else nullcontext()
        with terminal as live:
            last = False
            while not last:
                last = stop.is_set()  # what has just ended is shown, too
                states = watch.states()
                title = headline(states, before, time.monotonic() - began)
                if live is not None:
                    live.update(states_table(states, title, several), refresh=True)
                for state in states:
                    new = known[state.candidate.slug] != state.state
                    if live is None and new and state.state in ("training", "finished", "failed"):
                        out.print(line(state, title, several), markup=False, soft_wrap=True)
                    known[state.candidate.slug] = state.state
                if not last:
                    stop.wait(EVERY_S)

    thread = threading.Thread(target=show, name="live-table", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=10)


def headline(states: Sequence[TrialState], before: int, seconds: float) -> str:
    """ "12 of 43 finished, 2 running, about 8 min left"."""
    counts = Counter(state.state for state in states)
    running = sum(counts[stage] for stage in RUNNING)
    done = counts["finished"]
    parts = [f"{done} of {len(states)} finished", f"{running} running"]
    if counts["failed"]:
        parts.append(f"{counts['failed']} failed")
    if done > before and seconds > 5 and done + counts["failed"] < len(states):
        left = seconds / (done - before) * (len(states) - done - counts["failed"])
        parts.append(f"about {duration(left)} left")
    return ", ".join(parts)


def states_table(states: Sequence[TrialState], title: str, several: bool = False) -> Table:
    """What runs, what failed, and the best so far."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for column in ("Trial", "State", "Steps", "Entropy", "Probe %"):
        table.add_column(column, justify="left" if column in ("Trial", "State") else "right", no_wrap=True)
    running = [state for state in states if state.state in RUNNING]
    failed = [state for state in states if state.state == "failed"][:FAILED_SHOWN]
    scored = [state for state in states if state.score is not None]
    best = sorted((s for s in scored if s.candidate.range is not None), key=lambda s: -(s.score or 0.0))[:BEST]
    own = [state for state in scored if state.candidate.range is None]
    for group, style in ((running, "bold"), (failed, "red"), (own, ""), (best, "")):
        for state in group:
            table.add_row(*(Text(cell) for cell in _cells(state, several)), style=style)
    return table


def line(state: TrialState, title: str, several: bool = False) -> str:
    """One plain line about a change of state."""
    name, _, steps, entropy, probe = _cells(state, several)
    if state.state == "finished":
        parts = ["finished"] + ([f"probe {probe} %"] if probe else []) + ([f"entropy {entropy}"] if entropy else [])
        return f"{name}: {', '.join(parts)} ({title})"
    return f"{name}: failed, {state.error}" if state.state == "failed" else f"{name}: {state.state} {steps}".rstrip()


def _cells(state: TrialState, several: bool) -> tuple[str, str, str, str, str]:
    name = f"{state.candidate.adapter} {state.candidate.name}" if several else state.candidate.name
    steps = f"{state.done}/{state.total}" if state.total else ""
    entropy = "" if state.entropy is None else f"{state.entropy:.3f}"
    return name, state.state, steps, entropy, "" if state.score is None else f"{100 * state.score:.1f}"
