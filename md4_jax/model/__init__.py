"""Trained models as Python objects: docs/python.md."""
