"""What a rank computes: stages of layers, their gradients and weights. torch only; messages are somebody else's business."""
