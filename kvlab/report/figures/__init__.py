"""Figures: a plot as data, drawn by matplotlib, for files and inside the HTML page."""
