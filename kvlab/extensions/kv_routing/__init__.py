"""Stochastic routing of K/V in training (random cross-layer attention, arXiv 2604.22782)."""
