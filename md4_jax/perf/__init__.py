"""Benchmarks, and ahead-of-time compilation for absent devices."""
