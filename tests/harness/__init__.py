"""What the tests stand on: ranks that agree on an outcome, launches with a time limit, nothing left behind.

It imports nothing of hpctrain: a fault in the code under test must not be able to hide in the harness.
"""
