"""The exact numbers that findings quote."""

from kvlab.extensions.findings.articles import article_claims

EXACT_NUMBERS_OF_ARTICLES = [
    4_831_838_208,
    (1024 + 32 * 256) * 2 * 128 * 2,  # one global and 32 local slots of one head
    614_400 * 512,
    sum(3_109_942_400 * t + 307_200 * t**2 for t in range(256, 512)),
    5_242_880_000,
    48 * 7168 * 2 * 2 * 1024 * 128,
    48 * 7168 * 2 * 2 * 2048 * 128,
    2 * 12 * 12 * 768**2 + 2 * 50257 * 768 + 4 * 768 * 12 * 1024,  # matrices, head, attention
]


def test_numbers_that_findings_quote():
    assert [claim.exact for claim in article_claims()] == EXACT_NUMBERS_OF_ARTICLES
