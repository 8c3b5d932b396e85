"""How ranks talk: MPI, and the buffers it moves. May import plan; knows nothing of models or of training."""
