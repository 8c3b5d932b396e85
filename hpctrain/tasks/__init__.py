"""What to train: each file here is one task; `protocol.py` says what any task offers."""
