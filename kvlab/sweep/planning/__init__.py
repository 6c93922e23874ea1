"""Planning: which trials a sweep needs, what they cost, and why a trial is missing."""
