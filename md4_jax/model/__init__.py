"""Trained models as Python objects (docs/python.md), and models of other projects.

In this package `told` is what the config.json of a published model says: model/told.py.
"""
