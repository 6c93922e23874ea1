"""How a benchmark says that a limit it holds was not met."""


class LimitMissed(Exception):
    """Raised by a benchmark whose figure is outside its limit: which figure, which limit.

    Raise it after the last line, so that everything measured is printed.
    """
