"""The patch set's own package: finder, plugin, toolchain, tools. Imports nothing."""
