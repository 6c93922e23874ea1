"""Figures: what to plot (`plot`), laid out once (`layout`), then drawn as SVG or by matplotlib."""
