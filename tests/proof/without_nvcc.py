"""Run as a program: Python, where some folders are empty.

    without_nvcc.py FOLDER... -- ARGUMENTS

Ends with 77 where this user may not hide a folder. A program of Python's, since the
stand-in device is not passed on through others.
"""

import ctypes
import os
import subprocess
import sys

_CLONE_NEWNS = 0x20000
_SKIP = 77


def main() -> None:
    separator = sys.argv.index("--")
    # Private first: what is mounted then is seen by this process and its own.
    commands = [["mount", "--make-rprivate", "/"]]
    commands += [["mount", "-t", "tmpfs", "none", it] for it in sys.argv[1:separator]]
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        sys.exit(_SKIP)
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            sys.exit(_SKIP)
    os.execv(sys.executable, [sys.executable, *sys.argv[separator + 1 :]])


if __name__ == "__main__":
    main()
