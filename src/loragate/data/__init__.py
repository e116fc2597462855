"""Data: from a file or a hub id to token ids with a response mask.

formats    row formats brought to one shape          rows      rows that know their place
loading    files and hub to `Rows`                   chat      chat templates as text
tokens     text pieces to ids                        rendering turns to ids and labels
encoding   a whole dataset and its account           collate   padded batches
preview    the mask, to look at                      endings   will the model stop?
"""

from loragate.data.chat import Chat, template_hash
from loragate.data.collate import Collator
from loragate.data.encoding import EncodedRows, Summary, encode_rows
from loragate.data.endings import EndingReport, ending_health
from loragate.data.formats import FORMATS, Turns, detect_format, normalize
from loragate.data.loading import load_rows
from loragate.data.preview import mask_as_text, preview
from loragate.data.rendering import Encoded, Encoder, encode, prompt_ids, render_prompt
from loragate.data.rows import Rows

__all__ = [
    "FORMATS",
    "Chat",
    "Collator",
    "Encoded",
    "EncodedRows",
    "Encoder",
    "EndingReport",
    "Rows",
    "Summary",
    "Turns",
    "detect_format",
    "encode",
    "encode_rows",
    "ending_health",
    "load_rows",
    "mask_as_text",
    "normalize",
    "preview",
    "prompt_ids",
    "render_prompt",
    "template_hash",
]
