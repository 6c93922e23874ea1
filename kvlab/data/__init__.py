"""Text, tokens, batches and evaluation sets, with numpy and without torch."""
