"""`loragate push`: a gated folder becomes a repository on the hub."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.cli.arguments import Command
from loragate.errors import ConfigError
from loragate.hub_names import parse_hub_name


@dataclass(frozen=True)
class PushOptions:
    """Settings of `loragate push`.

    Attributes:
        places: gated folder, as `loragate calibrate --out` wrote it, and repository on the hub, owner/name; a missing
            repository is created.
        base_id: hub id of the base model, if the folder names a local one.
        private: make a new repository private; one that exists and is public is refused.
        revision: branch to write to, created if missing; by default the default branch, unless that holds another model.
        message: message of the commit.
        card: upload README.md too; --no-card keeps the README.md on the hub.
        dry_run: check the folder, say what would be sent, and send nothing.
    """

    places: tuple[str, ...] = ()
    base_id: str = ""
    private: bool = False
    revision: str = ""
    message: str = ""
    card: bool = True
    dry_run: bool = False


def run(options: PushOptions) -> int:
    """Check, upload, and print where it is and how it is loaded."""
    from loragate.gates.push import push_gated

    if len(options.places) != 2:
        found = " ".join(options.places) or "nothing"
        raise ConfigError(
            f"expected a gated folder and a repository, found {found}; for example: {COMMAND.examples[0]}"
        )
    folder, repository = options.places
    # a name without an owner is the user's own; what has a slash and is no hub name is the folder, in the wrong place
    if parse_hub_name(repository) is None and "/" in repository:
        raise ConfigError(
            f"{repository} is no name of a repository on the hub (owner/name); the gated folder comes first"
        )
    done = push_gated(
        folder,
        repository,
        base_id=options.base_id,
        private=options.private or None,  # None: as the owner's account makes new ones
        revision=options.revision or None,
        message=options.message,
        card=options.card,
        dry_run=options.dry_run,
    )
    if done.left:
        print(f"stays here: {', '.join(done.left)}")
    if options.dry_run:
        for path, size in done.files.items():
            print(f"  {size:>12,} bytes  {path}")
        print(f"would be sent to {repository}, on the base {done.base}; nothing was sent")
        return 0
    seen_by, kib = "private" if done.private else "public", sum(done.files.values()) / 1024
    print(f"{done.url} ({seen_by}): {len(done.files)} files, {kib:,.0f} KiB, on the base {done.base}")
    print(f"commit {done.commit}")
    print(f'load it: loragate.load_gated("{done.repository}", revision="{done.commit}")')
    print(f"next: loragate generate --model {done.repository}@{done.commit} --prompt TEXT")
    return 0


COMMAND = Command(
    name="push",
    options=PushOptions,
    run=run,
    examples=(
        "loragate push gated owner/name",
        "loragate push gated owner/name --base-id Qwen/Qwen2.5-1.5B --private",
        "loragate push gated owner/name --dry-run",
    ),
    positional="places",
)
