"""Benchmarks, avg@k / pass@k with intervals, reports."""
