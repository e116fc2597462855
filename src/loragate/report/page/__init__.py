"""The report as one self-contained HTML file: no network, no dependency, opens from disk."""
