"""The distribution functions that the report needs, from scipy, which is imported at first use."""


def t_below(value: float, df: float) -> float:
    """Probability that Student's t is below ``value``."""
    from scipy.special import stdtr  # type: ignore[import-untyped]

    return float(stdtr(df, value))


def t_quantile(share: float, df: float) -> float:
    """The value that Student's t is below with probability ``share``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, share))


def shifted_t_below(value: float, df: float, shift: float) -> float:
    """Probability that the noncentral t with this noncentrality is below ``value``."""
    from scipy.special import nctdtr

    return float(nctdtr(df, shift, value))


def chi_square_quantile(share: float, df: float) -> float:
    """The value that chi-square is below with probability ``share``."""
    from scipy.special import chdtri

    return float(chdtri(df, 1 - share))


def coin_at_most(heads: int, tosses: int) -> float:
    """Probability of at most ``heads`` in ``tosses`` of a fair coin."""
    from scipy.special import bdtr

    return float(bdtr(heads, tosses, 0.5))


def normal_beyond(value: float) -> float:
    """Probability that a standard normal is farther from zero than ``value``."""
    from scipy.special import erfc

    return float(erfc(abs(value) / 2**0.5))
