"""The source `mix`: several sources in one text, each with its share of every training step."""
