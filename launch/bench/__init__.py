"""Measuring: methods in alternation, their records, totals, tables, plots and reports, and baselines beside them."""
