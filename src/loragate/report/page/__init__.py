"""The report as one self-contained HTML file: no network, no dependency, opens from disk.

Plain data comes in (`content.py` says which), one text goes out. Everything a model or a user wrote is escaped by the
template engine or set as text by the script; a content security policy forbids everything else.
"""

from loragate.report.page.build import PAGE_LIMIT, build_page
from loragate.report.page.content import Block, Section

__all__ = ["PAGE_LIMIT", "Block", "Section", "build_page"]
