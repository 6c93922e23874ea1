"""The error of a benchmark that misses its limit."""


class LimitMissed(Exception):
    """A figure is outside its limit; the message names both.

    Raise it after the last line, so that all measurements are printed.
    """
