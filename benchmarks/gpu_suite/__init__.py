"""One GPU: training steps of ours next to HF Trainer's, in minutes."""
