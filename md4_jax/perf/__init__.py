"""How fast and how large: benchmarks, and compilation for devices that are not there."""
