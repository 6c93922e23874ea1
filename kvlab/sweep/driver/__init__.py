"""The driver of a sweep: start trials, classify how they end, retry or record."""
