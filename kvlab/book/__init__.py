"""What a page of the book is written with: values that carry an origin, figures, tables.

`from kvlab.book import bare, colour, compute, export, measured, parameter, recorded, reported, show`
"""

from kvlab.book.evidence import parameter, recorded, recorded_file, reported
from kvlab.book.exports import export
from kvlab.book.figures import bare, colour, show, show_table
from kvlab.book.traced import Traced, compute, measured
from kvlab.book.values import Origin, Value, describe

__all__ = [
    "Origin",
    "Traced",
    "Value",
    "bare",
    "colour",
    "compute",
    "describe",
    "export",
    "measured",
    "parameter",
    "recorded",
    "recorded_file",
    "reported",
    "show",
    "show_table",
]
