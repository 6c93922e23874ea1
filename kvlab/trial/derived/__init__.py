"""Metrics that follow from others: one function of the measurements a file.

The table of metrics names them, so they need no table of their own.
"""
