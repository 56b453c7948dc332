"""Decides which of vLLM's imports get our files. Runs at every interpreter start.

Why: an overlay at import level reaches every process (API server, engine,
workers, forked and spawned) with no flag. The one `.pth` line of the
distribution calls `install()`, so this file imports only `sys`; everything
else waits in `overlay` until a `vllm.` module is asked for.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Decision:
    """What the finder does in this process. Not changed once made.

    Attributes:
        active: our files are handed out.
        expected: needs no warning (active, or switched off on purpose).
        base: version of the base that matched, or "".
        reason: why the finder stands aside, or "".
        modules: module name -> file, exactly what the finder answers for.

    """

    def __init__(
        self,
        active: bool,
        expected: bool,
        base: str = "",
        reason: str = "",
        modules: "Mapping[str, str] | None" = None,
    ) -> None:
        self.active = active
        self.expected = expected
        self.base = base
        self.reason = reason
        self.modules = modules or {}


class OverlayFinder:
    """A `sys.meta_path` entry for exactly the module names in our tree.

    Takes no lock: two threads that ask first at the same time come to the same
    decision, and a fork in between cannot leave a lock held.
    """

    _decision: "Decision | None" = None

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        # A tool may ask before vLLM is there: that must not settle the decision.
        if not fullname.startswith("vllm.") or "vllm" not in sys.modules:
            return None
        location = self.decide().modules.get(fullname)
        if location is None:
            return None
        from .overlay import spec_for

        return spec_for(fullname, location)

    def decide(self) -> Decision:
        """Whether our files stand in for the base's; once per process."""
        if self._decision is None:
            try:
                from .overlay import decide

                self._decision = decide()
            except Exception as error:
                # A damaged install must not take vLLM down with it: stock
                # runs, and the plugin says why.
                reason = f"this installation is damaged: {error!r}"
                self._decision = Decision(False, expected=False, reason=reason)
        return self._decision


def install() -> OverlayFinder:
    """Put the finder in front of `sys.meta_path`; once per process."""
    finder = installed()
    if finder is None:
        finder = OverlayFinder()
        sys.meta_path.insert(0, finder)
    return finder


def installed() -> "OverlayFinder | None":
    """The finder of this process, or None."""
    for finder in sys.meta_path:
        if isinstance(finder, OverlayFinder):
            return finder
    return None
