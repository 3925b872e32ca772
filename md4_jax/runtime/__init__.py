"""Devices and meshes, processes, paths, checksums, compilation."""
