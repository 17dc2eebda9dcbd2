"""Measure: one module a question; importing this package imports neither torch nor triton."""
