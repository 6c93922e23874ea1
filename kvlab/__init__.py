"""Ablations of KV-cache reductions: YAML -> plan -> trial -> record -> report."""

__version__ = "0.2.0"
