"""Things made and freed a thousand times, and what is left of it; test_leaks.py says what may be.

``python -m leaks`` goes through all cycles, in a process of its own because a test runner grows by
itself, and prints a line of JSON for each.
"""
