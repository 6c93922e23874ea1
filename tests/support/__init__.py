"""What several test packages share: tiny sweeps, stub trials, references, servers and tools."""
