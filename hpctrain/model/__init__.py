"""What a rank computes: stages of layers, their gradients and weights. torch only, no messages."""
