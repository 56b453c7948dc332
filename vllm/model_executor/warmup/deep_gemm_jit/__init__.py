"""The DeepGEMM warmup, from what a kernel says it will run to a report of it."""
