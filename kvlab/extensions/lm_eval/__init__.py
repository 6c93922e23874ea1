"""Tasks of EleutherAI's lm-eval harness, one-shot and through the serving cache."""
