"""The machine: devices and meshes, processes, paths, checksums, compilation."""
