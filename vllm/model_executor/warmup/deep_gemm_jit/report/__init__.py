"""What a warmup did: values, and the forms in which they are read."""
