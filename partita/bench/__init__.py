"""Telling the user: benchmarks, explanations, reports."""
