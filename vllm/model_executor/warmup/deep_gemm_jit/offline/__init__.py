"""What serving a model will run, asked of the real vLLM with no GPU and no weights.

Runs in a child process on the stand-in: `python -m` this package. `serving` turns the
arguments of `vllm serve` into the engine's configuration, `ranks` says which ranks of
it differ, `lone_rank` makes one process one of them, `__main__` prints their specs.
"""
