"""The optimizer Muon beside AdamW: `training.optimizer`."""
