"""Benchmarks: methods run in alternation, their records, totals, tables and plots, and other libraries' decoders."""
