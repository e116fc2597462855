"""Between one kind of weights and another: fine-tuned checkpoints into adapters, gated adapters into plain ones."""
