"""Kernels built in parallel, once a node, by processes of their own. No torch, no vLLM.

`kernel` is what is built; `store` keeps what is planned; `planning` finds it through a
process on the stand-in device; `building` runs the compilers and `publish` puts what
they made into the cache; `coordinator` is the process that does it, and `session` is
how an engine talks to that process. `cpus` and `locks` say how much at once, and who.
"""
