"""Where a command takes a gated folder, it also takes `owner/name` or `owner/name@revision` of one on the hub."""

from __future__ import annotations

import logging


def on_disk(name: str) -> str:
    """A gated adapter on the hub as the folder it was downloaded to; any other name as it is.

    A name without @revision that is no gated adapter on the hub may be a base or a plain adapter there, which have their own
    loaders, and errors.

    Raises:
        ArtifactError: for a revision or file that is not there, or a download that failed.
    """
    from loragate.gates.hub import NotThere, download, hub_name, hub_source

    found = hub_name(name)
    if found is None:
        return name
    try:
        folder = download(found)
    except NotThere:
        if found.revision:
            raise
        return name
    logging.getLogger("loragate").warning("using %s", hub_source(folder))
    return str(folder)
