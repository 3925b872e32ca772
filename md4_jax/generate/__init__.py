"""Samples as people see them: prompts, files, pictures and pages."""
