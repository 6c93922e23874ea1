"""What a record says: matched comparisons, their statistics, decisions.

Drivers decide with it which seeds are still needed, and reports print it. It reads the store alone.
"""
