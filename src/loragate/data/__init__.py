"""Data: from a file or a hub id to token ids with a response mask.

Names in the order in which a row meets them:

- rows: files and the hub to `Rows`, which know their place
- formats: roles and texts checked, row formats brought to one shape
- chat: chat templates as text
- encoding: texts, prompts and turns to ids and labels, a whole dataset with its account, and its padded batches
- endings: what ends an answer, and will the model stop?
"""

from loragate.data.chat import Chat, describe_form, is_same_form, template_hash
from loragate.data.encoding import Collator, EncodedRows, encode_rows, preview, prompt_ids, raw_text, render_prompt
from loragate.data.endings import Endings, ending_health, find_endings
from loragate.data.formats import detect_format, normalize
from loragate.data.rows import Rows, load_rows

__all__ = [
    "Chat",
    "Collator",
    "EncodedRows",
    "Endings",
    "Rows",
    "describe_form",
    "detect_format",
    "encode_rows",
    "ending_health",
    "find_endings",
    "is_same_form",
    "load_rows",
    "normalize",
    "preview",
    "prompt_ids",
    "raw_text",
    "render_prompt",
    "template_hash",
]
