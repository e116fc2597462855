"""What a person sees of a run: the table, its reading in plain words, the figures. Takes plain data, knows no other room."""

from loragate.report.figures import accuracy_bars, entropy_curve, lambda_map
from loragate.report.reading import read_results
from loragate.report.table import results_markdown, results_table

__all__ = ["accuracy_bars", "entropy_curve", "lambda_map", "read_results", "results_markdown", "results_table"]
