"""Benchmarks: methods run in alternation, their records, totals, tables, plots and reports, and other libraries."""
