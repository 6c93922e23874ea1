"""Training: the loop, one optimizer step, the learning-rate schedule and checkpoints."""
