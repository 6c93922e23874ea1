"""Operations: detached drivers, jobs on a Ray cluster, the shared store."""
