"""Random all-reduces for a long time, while ranks are stopped and go on: `python -m tests.soak`."""
