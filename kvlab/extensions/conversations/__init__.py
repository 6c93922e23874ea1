"""Turns of conversations, a prefix cache between them, and the measure of what it reuses."""
