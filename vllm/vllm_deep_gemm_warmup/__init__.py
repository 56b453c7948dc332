"""The patch set's own package: finder, plugin, toolchain, tools. Imports nothing.

Imports point one way. Our files in vLLM's tree (`vllm/model_executor`) use this
package: its settings, the base in use, the toolchain, the kernel caches. Nothing
here uses them, and only `plugin` imports vLLM. tests/overlay/test_dependencies.py.
"""
