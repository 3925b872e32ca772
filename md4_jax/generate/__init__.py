"""Prompts, and the files, pictures and pages that show samples."""
