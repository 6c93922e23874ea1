"""Statistics of paired comparisons. Pure functions of numbers; scipy does the distributions."""
