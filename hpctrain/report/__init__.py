"""What a run tells: lines in a file, a line on the console, a table at the end. Neither MPI nor torch."""
