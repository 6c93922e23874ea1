"""Probes of what the average loss hides: associative recall, and a needle in a haystack."""
