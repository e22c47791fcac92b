"""What the families' files are written with: keys, tables of tensors, steps, GGUF."""
