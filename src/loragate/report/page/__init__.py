"""The report as one self-contained HTML file: no network, no dependency, opens from disk.

Plain data comes in (`content.py` says which), one text goes out. Everything a model or a user wrote is escaped by the
template engine or set as text by the script; a content security policy forbids everything else.
"""
