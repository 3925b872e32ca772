"""Benchmarks, and compilation for devices that are absent."""
